"""Low-rank adapters: their modules and first values, and folders of PEFT."""
