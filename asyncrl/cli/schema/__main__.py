"""Entry point that prints the JSON Schema of the tree, or with `--page` the page of all keys.

`python -m asyncrl.cli.schema > configs/schema.json`
`python -m asyncrl.cli.schema --page > docs/configuration.md`
"""

from __future__ import annotations

import json
import sys

from asyncrl.cli.schema.draft import json_schema
from asyncrl.cli.schema.page import render

sys.stdout.write(render() if "--page" in sys.argv[1:] else json.dumps(json_schema(), indent=1) + "\n")
