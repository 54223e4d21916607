"""What a machine would run, and refuse, by the executor's settings: the same as an executor that starts there."""

from pathlib import Path

import pytest

from engine_core.engine import CHECKS, ENGINES, check_engine, load_engine
from engine_core.errors import ModelError
from engine_core.kernels import build, instruction_sets
from services.executor.capabilities import check_machine, engine_config
from services.executor.settings import ExecutorSettings
from services.runtime.settings import BUILTIN_BYTES, ModelSettings

REFUSED = {
    "number type of another engine": ("reference", {"kv_dtype": "int8"}, "kv_dtype 'int8' is not one of"),
    "device of another engine": ("reference", {"device": "cuda"}, "choose the engine torch"),
    "number type that the kernels choose": ("native", {"dtype": "bfloat16"}, "leave device, dtype and attention"),
    "device that is not here": ("torch", {"device": "cuda:99"}, "device 'cuda:99' is not here"),
    "device that is not here, chosen by itself": ("auto", {"device": "cuda:99"}, "device 'cuda:99' is not here"),
    "blocks that the kernels do not have": ("native", {"block_size": 8}, "block_size 8 is not a multiple of 16"),
    "more memory than there is": ("native", {"kv_cache_bytes": 10**15}, "lower num_blocks or kv_cache_bytes"),
    "more memory than there is, in torch": ("reference", {"num_blocks": 10**9}, "lower num_blocks or kv_cache_bytes"),
    "weights in a format that nothing has": ("echo", {"quantise": "q8_0"}, "leave quantise empty"),
    "number type where nothing is computed": ("echo", {"kv_dtype": "int8"}, "device, dtype, kv_dtype and attention"),
    "pool that holds no sequence": ("echo", {"num_blocks": 1}, "cannot hold a sequence of 64"),
}


@pytest.mark.parametrize(("engine", "wishes", "complaint"), REFUSED.values(), ids=REFUSED.keys())
def test_the_check_refuses_what_the_engine_would_and_in_its_words(
    model_path: Path, engine: str, wishes: dict[str, object], complaint: str
) -> None:
    source = BUILTIN_BYTES if engine == "echo" else str(model_path)
    model = ModelSettings(source=source, max_model_len=64)
    executor = ExecutorSettings.model_validate({"engine": engine} | wishes)
    with pytest.raises(ValueError, match=complaint) as checked:
        check_machine(model, executor)
    config = engine_config(model, executor, None if engine == "echo" else model_path)
    with pytest.raises(ModelError) as loaded:
        load_engine(engine, config, lambda stage, fraction: None)
    said = [str(raised.value).split(", but")[0] for raised in (checked, loaded)]  # how much is free changes
    assert said[0] == said[1]


def test_what_would_run_is_told_with_what_is_worth_knowing(model_path: Path, tmp_path: Path) -> None:
    [told] = check_machine(ModelSettings(source=str(model_path)), ExecutorSettings(engine="torch"))
    assert told == "An executor on this machine would run the torch engine on cpu, torch bfloat16, sdpa attention."
    away = ModelSettings(source="hf:someone/something", cache_dir=tmp_path)
    _, not_here, threads = check_machine(away, ExecutorSettings(engine="reference", num_threads=1000))
    assert "not downloaded yet" in not_here
    assert "executor.num_threads is 1000, but this machine has" in threads
    assert list(tmp_path.iterdir()) == []


def test_without_compiler_and_compiled_kernels_the_native_engine_is_refused_and_auto_tells_why_it_takes_another(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelSettings(source=str(model_path))
    monkeypatch.setattr(build, "PACKAGED_DIR", tmp_path)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    monkeypatch.setattr("engine_core.kernels.binding.cpu_flags", lambda: instruction_sets.AVX2_CPU_FLAGS)
    with pytest.raises(ValueError, match=r"install one \(Debian: apt install g\+\+\)"):
        check_machine(model, ExecutorSettings(engine="native"))
    [told] = check_machine(model, ExecutorSettings())
    assert "the reference engine" in told
    assert "no C++ compiler" in told
    monkeypatch.setattr("engine_core.kernels.binding.cpu_flags", frozenset)
    with pytest.raises(ValueError, match="none of the instruction sets"):
        check_machine(model, ExecutorSettings(engine="native"))


def test_every_engine_can_be_asked() -> None:
    assert CHECKS.keys() == ENGINES.keys()
    with pytest.raises(KeyError):
        check_engine("steam", engine_config(ModelSettings(), ExecutorSettings(), None))


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        check_machine(ModelSettings(source=str(tmp_path / "nowhere.gguf")), ExecutorSettings())
