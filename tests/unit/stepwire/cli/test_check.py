import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loader.checkpoint import open_checkpoint
from stepwire.cli import check_output
from stepwire.cli.checks.finding import human_bytes
from stepwire.cli.checks.memory import Memory
from stepwire.cli.main import run
from tests.support.tiny_adapter import make_tiny_adapter
from tests.support.tiny_checkpoint import make_tiny_llama
from tests.support.tiny_others import SERVED, make_tiny_other
from tests.support.tiny_quantised import write_tensors
from tests.support.tiny_quantised_models import awq, make_tiny_quantised, stored_tensors


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "m", sharded=True, dtype="bfloat16")


def answer(capsys: pytest.CaptureFixture[str], status: int, *arguments: object) -> Any:
    assert run(["check", "--json", *map(str, arguments)]) == status
    return json.loads(capsys.readouterr().out)


def test_a_usable_checkpoint_is_described_and_exits_with_0(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    assert run(["check", str(model), "--memory", "1GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    for words in ("LlamaForCausalLM", "safetensors, 2 files", "1, 2, 4", "KV PER TOKEN", "KV blocks of 16 in 1.0 GiB"):
        assert words in text
    assert lines[-1] == "usable: tp 1, pp 1, bfloat16"


def test_of_a_model_that_is_none_of_ours_it_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["check", str(make_tiny_other(tmp_path, "gpt2", SERVED["gpt2"]))]) == 0
    text = capsys.readouterr().out
    for words in (
        "GPT2LMHeadModel",
        "not held against the model",
        "pp that work   1",
        "transformers' definition of it",
    ):
        assert words in text
    assert "shared with the head" not in text


def test_json_holds_every_figure(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = answer(capsys, 0, model, "--tp", 2, "--pp", 2, "--dtype", "float32", "--memory", "2MiB")
    assert (found["usable"], found["problems"], found["format"]) == (True, [], "safetensors")
    assert (found["tp_sizes"], found["max_pp"], found["files"]) == ([1, 2, 4], 2, 2)
    assert found["stored_dtypes"] == {"BF16": found["stored_bytes"]}
    assert found["stored_bytes"] == 2 * found["parameters"]
    assert [(rank["pipeline_rank"], rank["tensor_rank"]) for rank in found["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(rank["weight_bytes"] == 2 * rank["read_bytes"] for rank in found["ranks"])
    assert found["kv_blocks"] > 0
    assert found["fitting_max_model_len"] == 512


def test_a_wish_that_cannot_be_met_exits_with_1(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    found = answer(capsys, 1, model, "--tp", 3, "--max-model-len", 10_000)
    assert [problem["code"] for problem in found["problems"]] == ["tensor_parallel", "max_model_len"]
    assert (found["ranks"], found["kv_blocks"]) == ([], None)
    assert run(["check", str(model), "--tp", "3", "--pp", "9"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("problem: tp 3 does not work")
    assert lines[-1] == "not usable: pp 9 does not work: the model has 2 layers; use a pp of 1 to 2"


def test_a_checkpoint_that_is_broken_names_file_and_tensor(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    shard = model / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    found = answer(capsys, 1, model)
    assert found["usable"] is False
    (problem,) = found["problems"]
    assert (problem["code"], problem["file"]) == ("invalid", str(shard))
    assert "10 bytes are missing" in problem["message"]
    assert run(["check", str(model)]) == 1
    assert capsys.readouterr().out.startswith("not usable: ")


def test_a_quantised_checkpoint_is_described_as_what_it_becomes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = make_tiny_quantised(tmp_path / "q", awq())
    found = answer(capsys, 0, model, "--dtype", "bfloat16")
    plain = answer(capsys, 0, make_tiny_llama(tmp_path / "plain"), "--dtype", "bfloat16")
    assert (found["quantisation"], plain["quantisation"]) == ("awq", None)
    assert found["parameters"] == plain["parameters"]
    assert found["ranks"][0]["weight_bytes"] < 0.6 * plain["ranks"][0]["weight_bytes"]
    assert run(["check", str(model)]) == 0
    assert "14 products, by awq" in " ".join(capsys.readouterr().out.split())


def test_rounding_as_it_is_read_is_counted(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    sizes = [
        answer(capsys, 0, model, "--quantize", kind)["ranks"][0]["weight_bytes"] for kind in ("none", "int8", "int4")
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    assert run(["check", str(model), "--quantize", "int4"]) == 0
    assert "held as bfloat16, rounded to int4" in " ".join(capsys.readouterr().out.split())


def test_a_smaller_cache_is_counted(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    plain, rounded = (
        answer(capsys, 0, model, "--kv-cache-dtype", kind)["ranks"][0]["kv_bytes_per_token"] for kind in ("auto", "fp8")
    )
    # Two layers, two key-value heads of 16 values in bfloat16; of eight bits, with a scale of four bytes a head.
    assert (plain, rounded) == (2 * 2 * 2 * 16 * 2, 2 * 2 * 2 * (16 + 4))


def test_a_quantised_checkpoint_without_a_scale_is_not_usable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = make_tiny_quantised(tmp_path / "q", awq())
    tensors = stored_tensors(model)
    name = "model.layers.1.mlp.up_proj.scales"
    del tensors[name]
    write_tensors(model / "model.safetensors", tensors)
    (problem,) = answer(capsys, 1, model)["problems"]
    assert (problem["code"], problem["tensor"]) == ("invalid", name)


def test_more_host_memory_than_there_is_here_is_a_warning(
    capsys: pytest.CaptureFixture[str], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check_output, "read_memory", lambda: Memory(1 << 30, 1 << 30, 100 << 20, 50 << 20))
    found = answer(capsys, 0, model)
    peak = human_bytes(found["ranks"][0]["host_peak_bytes"])
    expected = f"loading a rank takes up to {peak} of host memory, and this machine has 50.0 MiB left"
    assert found["warnings"] == [expected]


def test_adapters_are_checked_with_it(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    config = open_checkpoint(model).config
    adapter = make_tiny_adapter(tmp_path / "adapter", config)
    assert run(["check", str(model), "--tp", "2", "--adapter", str(adapter)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "rank 4, 2 down_proj, 2 q_proj, 10.0 KiB, 7.0 KiB a rank" in said
    assert "no adapters: they are checked, and not yet served" in said
    found = answer(capsys, 0, model, "--tp", 2, "--adapter", adapter, "--adapter", adapter)
    assert len(found["adapters"]) == 2
    first = found["adapters"][0]
    assert (first["path"], first["max_rank"], first["full_weights"]) == (str(adapter), 4, [])
    assert first["modules"]["model.layers.0.self_attn.q_proj"] == {"rank": 4, "scaling": 2.0}
    assert [2 * size for size in first["rank_bytes"]] == [rank["adapter_bytes"] for rank in found["ranks"]]
    assert found["host_peak_bytes"] == sum(rank["host_peak_bytes"] for rank in found["ranks"])


def test_an_adapter_that_does_not_fit_exits_with_1(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    adapter = make_tiny_adapter(tmp_path / "adapter", open_checkpoint(model).config, target_modules=["w1"])
    found = answer(capsys, 1, model, "--adapter", adapter)
    (problem,) = found["problems"]
    assert (problem["code"], problem["file"], problem["found"]) == (
        "invalid",
        str(adapter / "adapter_config.json"),
        "w1",
    )
    assert run(["check", str(model), "--adapter", str(adapter)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("not usable: ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--max-adapter-rank", "0"), "--max-adapter-rank"),
        (("--tp", "0"), "--tp"),
        (("--memory", "plenty"), "80GiB"),
        (("--memory", "0"), "80GiB"),
        (("--memory", "9" * 400), "80GiB"),
        (("--dtype", "int3"), "bfloat16"),
        (("--quantize", "int3"), "int4"),
        (("--kv-cache-dtype", "int4"), "fp8"),
        (("--block-size", "257"), "--block-size"),
        (("--max-model-len", "0"), "--max-model-len"),
    ],
)
def test_wrong_usage_exits_with_2(
    capsys: pytest.CaptureFixture[str], model: Path, arguments: tuple[str, ...], words: str
) -> None:
    assert run(["check", str(model), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_path_need_not_be_text(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    odd = model.rename(model.with_name(os.fsdecode(b"caf\xe9")))
    assert run(["check", str(odd)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("usable: ")
    (odd / "config.json").unlink()
    assert answer(capsys, 1, odd)["problems"][0]["code"] == "not_found"


def test_no_checkpoint_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check"]) == 2
    assert "CHECKPOINT" in capsys.readouterr().err


def test_torch_is_not_imported(model: Path) -> None:
    script = (
        "import sys; from stepwire.cli.main import run; "
        f"status = run(['check', {str(model)!r}, '--json']); "
        "sys.exit(status or ('torch' in sys.modules) * 3)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_verify_reads_what_has_a_hash_and_names_what_has_none(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWIRE_CACHE", str(tmp_path / "cache"))
    first, second = sorted(model.glob("*.safetensors"))
    (model / f"{first.name}.sha256").write_text(hashlib.sha256(first.read_bytes()).hexdigest())
    found = answer(capsys, 0, model, "--verify")
    assert (found["verified_files"], found["files_without_hash"]) == ([str(first)], [str(second)])
    assert run(["check", str(model), "--verify"]) == 0
    text = capsys.readouterr().out
    assert "verified: 1 of 2 files" in text
    assert f"not verified: nothing tells the SHA-256 of {second}" in text
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    assert answer(capsys, 0, model)["verified_files"] is None
    (problem,) = answer(capsys, 1, model, "--verify")["problems"]
    assert (problem["code"], problem["file"]) == ("invalid", str(first))


def test_a_path_of_this_machine_needs_no_network_library(model: Path) -> None:
    program = (
        "import sys; from stepwire.cli.main import run; run(['check', '--json', sys.argv[1]]); "
        "print(sorted({'fsspec', 'huggingface_hub', 'httpx', 'urllib.request', 'torch', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(model)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
