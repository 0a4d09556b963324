"""The commands, through click's runner: what they print, and that any failure is exit code 1."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from cuflash import check as checking
from cuflash import presets
from cuflash.backends import why_no_gpu
from cuflash.cli import main


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def makefile_calls() -> list[str]:
    text = (Path(__file__).resolve().parent.parent / "Makefile").read_text()
    return re.findall(r"\$\(PY\) -m cuflash (.+)", text)


@pytest.mark.parametrize("call", makefile_calls())
def test_the_makefile_calls_commands_as_they_are(call: str) -> None:
    name, *arguments = call.split()
    main.commands[name].make_context(name, arguments).close()  # parses, and runs nothing


def test_help_names_every_command() -> None:
    text = invoke("--help").stdout
    for command in ("info", "check", "bench", "explain", "source", "compile"):
        assert command in text
        assert invoke(command, "--help").exit_code == 0


def test_info_says_what_is_here_and_what_is_missing() -> None:
    facts = json.loads(invoke("info", "--json").stdout)
    assert facts["device"] in ("gpu", "emulator")
    assert facts["versions"]["numpy"] == np.__version__
    assert all(absent["remedy"] for absent in facts["missing"])
    assert "cuflash" in invoke("info").stdout


def test_check_passes_on_the_emulator() -> None:
    answer = json.loads(invoke("check", "--device", "emulator", "--preset", "minilm", "--quick", "--json").stdout)
    assert answer["failed"] == 0
    (case,) = answer["cases"]
    assert case["ok"]
    assert [deviation["name"] for deviation in case["deviations"]] == ["out", "lse", "dq", "dk", "dv"]
    assert all(0 <= deviation["error"] <= deviation["budget"] for deviation in case["deviations"])


def test_check_prints_one_row_a_case() -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(
        main, ["check", "--device", "emulator", "--preset", "gpt2", "--quick"]
    )
    assert result.exit_code == 0, result.output
    assert "gpt2" in result.stdout
    assert "1 case, within budget" in result.stdout


def test_a_wrong_kernel_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = checking._compute

    def wrong(*arguments: object) -> dict[str, np.ndarray]:
        found = honest(*arguments)  # type: ignore[arg-type]
        found["dk"] = found["dk"] * 1.5
        return found

    monkeypatch.setattr(checking, "_compute", wrong)
    result = invoke("check", "--device", "emulator", "--preset", "minilm", "--quick", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["failed"] == 1


def test_a_forced_family_that_takes_nothing_is_no_success() -> None:
    """float32 has no Hopper kernel: no failure, but nothing checked either."""
    result = invoke("check", "--device", "emulator", "--preset", "minilm", "--quick", "--family", "sm90", "--json")
    assert result.exit_code == 1
    (case,) = json.loads(result.stdout)["cases"]
    assert case["ok"]
    assert "float32" in case["refusal"]


def test_a_crash_is_a_row_and_not_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, np.ndarray]:
        raise RuntimeError("the kernel fell over")

    monkeypatch.setattr(checking, "_compute", broken)
    result = invoke("check", "--device", "emulator", "--preset", "all", "--quick", "--json")
    assert result.exit_code == 1
    assert all("fell over" in case["failure"] for case in json.loads(result.stdout)["cases"])


def test_explain_names_kernels_and_reasons() -> None:
    plans = json.loads(invoke("explain", "--preset", "llama3-8b", "--arch", "sm_80", "--json").stdout)["plans"]
    assert [plan["kind"] for plan in plans] == ["forward", "backward"]
    assert all(launch["grid"] > 0 and launch["kernel"] for plan in plans for launch in plan["launches"])


def test_json_is_one_text_whatever_was_asked_for() -> None:
    assert isinstance(json.loads(invoke("explain", "--arch", "sm_80", "--align", "-5", "--json").stdout), dict)
    plans = json.loads(invoke("explain", "--arch", "sm_80", "--preset", "all", "--json").stdout)
    assert [entry["shape"] for entry in plans] == [shape.name for shape in presets.preset_shapes("all")]


def test_explain_predicts_what_a_hopper_forward_can_reach() -> None:
    def shares(*more: str) -> list[float]:
        arguments = ("explain", "--arch", "sm_90a", "--heads", "16", "--json", *more)
        return [plan["predicted_share"] for plan in json.loads(invoke(*arguments).stdout)["plans"]]

    long, backward = shares("--batch", "8", "--seqlen", "16896")
    assert 0.99 < long <= 1.0 and backward is None  # 1056 tiles of one length on each of 16 heads: whole rounds
    assert shares("--seqlen", "512", "--causal")[0] < 0.5  # fewer tiles than multiprocessors, cut by the diagonal
    assert shares("--dtype", "float32")[0] is None
    text = invoke("explain", "--arch", "sm_90a").stdout
    assert "of the tensor cores' peak" in text


def test_explain_measures_only_the_gpu_that_is_here() -> None:
    result = CliRunner().invoke(main, ["explain", "--arch", "sm_80", "--measure"])
    assert result.exit_code == 1 and "GPU" in result.output


def test_source_prints_what_nvrtc_gets() -> None:
    text = invoke("source", "--arch", "sm_80", "--head-dim", "64", "--causal", "--dtype", "float16").stdout
    assert text.startswith("// cuda_src digest ")
    assert "struct Config" in text
    assert "static_assert(sizeof(Params) ==" in text


def test_compile_needs_no_gpu(tmp_path: object) -> None:
    pytest.importorskip("cupy_backends.cuda.libs.nvrtc")
    arguments = ("--arch", "sm_80", "--preset", "gpt2", "--symbol", "forward", "--out", str(tmp_path), "--json")
    rows = json.loads(invoke("compile", *arguments).stdout)
    assert rows
    assert all(row["ok"] and row["bytes"] > 0 and row["registers"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("check", "--preset", "gpt5"), "there are: all, gpt2"),
        (("check", "--device", "tpu"), "'tpu' is not one of"),
        (("explain", "--arch", "sm_70"), "sm_80"),
        (("explain", "--head-dim", "513"), "head_dim=513"),
        (("explain", "--preset", "gpt2", "--head-dim", "32", "--causal"), "leave out --head-dim, --causal"),
        (("explain", "--window", "-3,0"), "must not be negative"),
        (("explain", "--window", "3"), "must be LEFT,RIGHT"),
        (("explain", "--window", "a,b"), "must be LEFT,RIGHT"),
        (("explain", "--window", "1,2,3"), "must be LEFT,RIGHT"),
        (("explain", "--batch", "-1"), "--batch"),
        (("explain", "--seqlen", "-5"), "--seqlen"),
        (("explain", "--kv-heads", "0"), "multiple of num_kv_heads=0"),
        (("explain", "--align", "middle"), "align='middle'"),
        (("explain", "--softcap", "1e300"), "softcap=1e+300"),
        (("explain", "--heads", "6", "--kv-heads", "4"), "multiple of num_kv_heads=4"),
        (("explain", "--dtype", "float64"), "float64"),
        (("source", "--symbol", "nothing"), "no kernel contains 'nothing'"),
        (("explain", "--family", "sm99"), "sm99"),
    ],
)
def test_refusals_say_what_would_be_right(arguments: tuple[str, ...], told: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code != 0
    assert told in result.output
    assert "Traceback" not in result.output


def test_bench_without_a_gpu_says_so() -> None:
    if not why_no_gpu():
        pytest.skip("there is a GPU here")
    result = invoke("bench")
    assert result.exit_code == 1
    assert "needs a GPU" in result.output


def test_tune_without_a_gpu_says_so() -> None:
    if not why_no_gpu():
        pytest.skip("there is a GPU here")
    result = invoke("tune")
    assert result.exit_code == 1
    assert "is tuned on a GPU" in result.output


CROOKED = {
    "no stdout": (("info",), {"stdout": None}),
    "a full disk": (("info",), {"stdout": "/dev/full"}),
    "a full disk, json": (("info", "--json"), {"stdout": "/dev/full"}),
    "a folder below a file": (("compile", "--arch", "sm_80", "--preset", "gpt2", "--out", "/dev/null/x"), {}),
    "a reader who leaves": (("explain", "--arch", "sm_80", "--preset", "all"), {"stdout": "leaves"}),
}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full of Linux")
@pytest.mark.parametrize(("arguments", "world"), CROOKED.values(), ids=CROOKED)
def test_a_crooked_world_is_no_traceback(arguments: tuple[str, ...], world: dict[str, Any]) -> None:
    command = " ".join(["exec", sys.executable, "-m", "cuflash", *arguments])
    place = world.get("stdout", "/dev/null")
    command += {None: " >&-", "leaves": " | head -c 10"}.get(place, f" >{place}")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "Traceback" not in done.stderr
    assert place in (None, "leaves") or done.returncode == 1


@pytest.mark.gpu
def test_bench_writes_record_and_picture(tmp_path: object) -> None:
    if why := why_no_gpu():
        pytest.skip(why)
    record, picture = f"{tmp_path}/record.json", f"{tmp_path}/picture.png"
    arguments = ("--preset", "gpt2", "--peers", "none", "--budget", "2", "--save", record, "--plot", picture, "--json")
    rows = json.loads(invoke("bench", *arguments).stdout)["rows"]
    assert {row["mode"] for row in rows} == {"fwd", "bwd"}
    assert all(row["cuflash"]["tflops"] > 0 for row in rows)


def test_quick_cases_exist() -> None:
    names = {shape.name for shape in presets.preset_shapes("all")}
    assert set(checking.QUICK) <= names
