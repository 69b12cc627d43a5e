"""The plans that are written down, against those of the transformers that is installed."""

import re

from transformers import CONFIG_MAPPING

from loader.other_plans import BY_COLUMNS, BY_ROWS, PLANS


def test_plans_are_those_of_transformers() -> None:
    for model_type, plan in PLANS.items():
        theirs = {
            re.sub(r"^(layers|h)\.\*\.", "", module): style
            for module, style in CONFIG_MAPPING[model_type].base_model_tp_plan.items()
            # How gradients are summed says nothing of weights, and embeddings are divided by token ids always.
            if style not in ("replicated_with_grad_allreduce", "embedding_rowwise")
        }
        assert plan == theirs, model_type
        assert set(plan.values()) <= BY_ROWS | BY_COLUMNS | {"moe_tp_experts"}
