"""How transformers divides its own definitions over tensor-parallel ranks, as data: the plans of those that were tried.

By model type, the modules of a layer and how each is divided; what is not named every rank holds whole. They are
those of transformers 5 ("base_model_tp_plan"), written down here because the scheduler, which checks whether a model
can be split, never imports it. Imports no torch.
"""

from collections.abc import Mapping

Plan = Mapping[str, str]

_ATTENTION = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.o_proj": "rowwise",
}
# Where all heads are normalised together.
_GATHERED_ATTENTION = {
    "self_attn.q_proj": "colwise_gather_output",
    "self_attn.k_proj": "colwise_gather_output",
    "self_attn.v_proj": "colwise_gather_output",
    "self_attn.o_proj": "rowwise_split_input",
}
_GATED = {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
_PLAIN = {"mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
_EXPERTS = {
    "mlp.experts.gate_up_proj": "packed_colwise",
    "mlp.experts.down_proj": "rowwise",
    "mlp.experts": "moe_tp_experts",
}
_SHARED_EXPERTS = {
    "mlp.shared_experts.gate_proj": "colwise",
    "mlp.shared_experts.up_proj": "colwise",
    "mlp.shared_experts.down_proj": "rowwise",
}
_J = {
    "attn.q_proj": "colwise",
    "attn.k_proj": "colwise",
    "attn.v_proj": "colwise",
    "attn.out_proj": "rowwise",
    "mlp.fc_in": "colwise",
    "mlp.fc_out": "rowwise",
}
_LLAMA = {**_ATTENTION, **_GATED}
_NO_GATE = {**_ATTENTION, **_PLAIN}
_SOME_EXPERTS = {**_LLAMA, **_EXPERTS}
_EXPERTS_AND_SHARED = {**_SOME_EXPERTS, **_SHARED_EXPERTS}
_GATHERED_EXPERTS = {**_GATHERED_ATTENTION, **_EXPERTS}
_GLM = {**_ATTENTION, "mlp.gate_up_proj": "colwise_gather_output", "mlp.down_proj": "rowwise_split_input"}

PLANS: Mapping[str, Plan] = {
    **dict.fromkeys(
        (
            *("cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "granite", "helium", "hyperclovax"),
            *("ministral", "ministral3", "olmo", "seed_oss", "smollm3", "vaultgemma"),
        ),
        _LLAMA,
    ),
    **dict.fromkeys(("arcee", "jais2", "nemotron", "apertus"), _NO_GATE),
    **dict.fromkeys(("qwen2_moe", "cohere2_moe", "exaone_moe", "mellum"), _SOME_EXPERTS),
    **dict.fromkeys(("dots1", "ernie4_5_moe", "glm4_moe"), _EXPERTS_AND_SHARED),
    **dict.fromkeys(("flex_olmo", "olmoe", "minimax_m2"), _GATHERED_EXPERTS),
    **dict.fromkeys(("glm", "glm4"), _GLM),
    "solar_open": {**_ATTENTION, **_EXPERTS},
    "olmo3": {**_GATHERED_ATTENTION, **_GATED},
    "phimoe": _EXPERTS,
    "gptj": _J,
    "gpt_neox": {
        "attention.query_key_value": "colwise",
        "attention.dense": "rowwise",
        "mlp.dense_h_to_4h": "colwise",
        "mlp.dense_4h_to_h": "rowwise",
    },
    "nanochat": {**_ATTENTION, "mlp.fc1": "colwise", "mlp.fc2": "rowwise"},
    "phi": {
        "self_attn.q_proj": "colwise",
        "self_attn.k_proj": "colwise",
        "self_attn.v_proj": "colwise",
        "self_attn.dense": "rowwise",
        "mlp.fc1": "colwise",
        "mlp.fc2": "rowwise",
    },
    "starcoder2": {**_ATTENTION, "mlp.c_fc": "colwise", "mlp.c_proj": "rowwise"},
}
"""Model types that can be split."""

BY_ROWS = frozenset({"colwise", "colwise_gather_output", "packed_colwise"})
"""Ways to divide that give each rank some of a weight's rows, which are its outputs."""
BY_COLUMNS = frozenset({"rowwise", "rowwise_split_input"})
"""Ways to divide that give each rank some of a weight's columns, which are its inputs; the results are summed."""
