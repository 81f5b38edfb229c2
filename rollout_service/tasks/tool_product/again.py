"""`python -m rollout_service.tasks.tool_product.again FOLDER` makes the model in `warm_started/` again."""

from __future__ import annotations

from rollout_service.tasks.tool_product.folder import Recipe, save_warm_start
from rollout_service.tasks.warm_started import make_again

if __name__ == "__main__":
    make_again(
        "rollout_service.tasks.tool_product.again", Recipe.seed, Recipe.num_warm_start_steps, save_warm_start
    )
