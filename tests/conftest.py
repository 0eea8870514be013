"""What the tests share: a model that takes no time to load, and a server that has it loaded."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

from tests import forked_server, forked_tester, forked_worker
from tests.forked_worker import fork_workers, started_as_ever
from tests.running_server import RunningServer, running
from tests.tiny_models import write_model
from tests.tiny_tried_vlms import write_tried
from tests.tiny_vlms import VISION_FAMILIES, write_vlm

# Tests run beside one another on few cores, where threads that spin for work only take turns.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
fork_workers()
# How long an example takes is the machine's affair; `make soak` looks for new ones.
hypothesis.settings.register_profile(
    "steady",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("steady")
# What `make test` asks for: the same examples, a quarter of them.
hypothesis.settings.register_profile("quick", hypothesis.settings(), max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    """Let the processes of `pytest -n` share what forks servers, workers and themselves."""
    starts_others = config.getoption("tx", None) and "PYTEST_XDIST_WORKER" not in os.environ
    if sys.platform == "linux" and starts_others:
        for module in (forked_worker, forked_server, forked_tester):
            module.nursery().share()
        config.option.tx = [f"popen//python={forked_tester.python()}" for _ in config.option.tx]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage among modules and tests: they stay to the end, and no test has to go
    through them either.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Beside a failure, what the servers of its test said at last."""
    del call
    report = yield
    if report.failed:
        servers = getattr(item, "funcargs", {}).values()
        said = [one.plight() for one in servers if isinstance(one, RunningServer)]
        report.sections += [("what its server said at last", one) for one in said]
    return report


@pytest.fixture(scope="session")
def models_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`tiny` and its copy `twin` work, `broken` looks like a model and cannot be loaded."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(write_model(folder / "tiny"), folder / "twin")
    broken = folder / "broken"
    shutil.copytree(folder / "tiny", broken)
    (broken / "model.safetensors").write_bytes(b"\xff" * 64)
    return folder


@pytest.fixture(scope="session")
def vlms_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family that sees, named after it."""
    pytest.importorskip("mlx_vlm")
    folder = tmp_path_factory.mktemp("vlms")
    for family in VISION_FAMILIES:
        write_vlm(folder / family, family)
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, models_dir: Path) -> Iterator[RunningServer]:
    """A server as it comes, with `tiny` loaded."""
    home = tmp_path_factory.mktemp("home")
    config = f"""
models_dir = "{models_dir}"
default_model = "tiny"
max_loaded_models = 1
[aliases]
little = "tiny"
"""
    with running(home, config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


@pytest.fixture(scope="session")
def seeing_server(
    tmp_path_factory: pytest.TempPathFactory, vlms_dir: Path, models_dir: Path
) -> Iterator[RunningServer]:
    """A server whose default model sees; `blind` reads text only, `tried` is of a kind that is
    tried out, `muted` of one whose template shows no images, `paligemma` cannot be shown any.
    """
    home = tmp_path_factory.mktemp("seeing")
    for name, kind in (("tried", "pixtral"), ("muted", "idefics3"), ("paligemma", "paligemma")):
        write_tried(home / name, kind)
    template = home / "muted" / "chat_template.jinja"
    template.write_text(template.read_text().replace("<image>", ""))
    config = f"""
models_dir = "{vlms_dir}"
default_model = "qwen3_vl"
max_loaded_models = 2
max_body_bytes = 1000000
[models.blind]
path = "{models_dir / "tiny"}"
[models.tried]
path = "{home / "tried"}"
[models.muted]
path = "{home / "muted"}"
[models.paligemma]
path = "{home / "paligemma"}"
"""
    with running(home, config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


@pytest.fixture(scope="session")
def narrow_server(
    tmp_path_factory: pytest.TempPathFactory, models_dir: Path
) -> Iterator[RunningServer]:
    """A server with room for one running request, a short queue and frequent signs of life."""
    home = tmp_path_factory.mktemp("narrow")
    config = f"""
models_dir = "{models_dir}"
default_model = "tiny"
preload = []
max_loaded_models = 1
max_batch = 1
max_queue = 4
keep_alive_s = 0.2
prefill_slice = 32
max_body_bytes = 20000000
"""
    with running(home, config=config) as server:
        yield server
        assert "Traceback" not in server.stderr


@pytest.fixture
def slow_narrow_server(narrow_server: RunningServer) -> Iterator[RunningServer]:
    """The same while models take their seconds to load."""
    with narrow_server.slow_loads():
        yield narrow_server


@pytest.fixture
def slow_loads() -> Iterator[None]:
    """Models that the test's own process has loaded take their seconds."""
    with started_as_ever():
        yield
