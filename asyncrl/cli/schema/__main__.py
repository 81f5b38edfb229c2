"""Entry point that prints the JSON Schema of the tree, or with `--page` the page of all keys.

`python -m asyncrl.cli.schema > configs/schema.json`
`python -m asyncrl.cli.schema --page > docs/configuration.md`
"""

from __future__ import annotations

import json
import sys

from asyncrl.cli.schema.draft import json_schema
from asyncrl.cli.schema.page import render

if "--page" in sys.argv[1:]:
    sys.stdout.write(render())
else:
    sys.stdout.write(json.dumps(json_schema(), indent=1) + "\n")
