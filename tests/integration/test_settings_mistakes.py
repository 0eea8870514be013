"""Mistakes in the settings that can only be seen on the machine: told by the check and at boot."""

from __future__ import annotations

from pathlib import Path

from tests.running_server import free_port, hearth, running


def check(home: Path) -> tuple[int, str]:
    done = hearth("config", "check", HEARTH_HOME=str(home))
    return done.returncode, done.stdout + done.stderr


def test_a_model_that_is_not_there_is_told_and_the_others_are_served(tmp_path: Path):
    config = 'preload = []\nspare_worker = false\n[models.gone]\npath = "/nowhere"\npinned = true\n'
    (tmp_path / "hearth.toml").write_text(config)
    why = "its path /nowhere does not exist: correct path, or put it there"
    code, said = check(tmp_path)
    assert code == 1
    assert "name what cannot be used" in said
    assert f"left out: gone: {why}\n" in said
    with running(tmp_path, config=config) as server:
        assert f"; gone cannot be used: {why}" in server.ready_line
        listed = server.get("/v1/models").json()
        assert "hearth-tiny" in {card["id"] for card in listed["data"]}
        assert listed["refused"] == [{"id": "gone", "code": "model_not_found", "reason": why}]
        shown = hearth("models", HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(server.port)).stdout
        assert f"cannot be used: gone: {why}\n" in shown


def test_a_models_dir_that_is_not_there_is_refused_by_the_check_and_at_boot(tmp_path: Path):
    (tmp_path / "hearth.toml").write_text('models_dir = "gone"\n')
    why = f"models_dir is {tmp_path / 'gone'}, which does not exist. Create it, or correct the key."
    code, said = check(tmp_path)
    assert (code, why in said) == (2, True)
    served = hearth("serve", HEARTH_HOME=str(tmp_path), HEARTH_PORT=str(free_port()))
    assert (served.returncode, why in served.stderr) == (2, True)


def test_a_repository_that_is_not_pulled_is_told_with_the_command(tmp_path: Path):
    config = '[models.a]\nrepo = "org/not-pulled"\naliases = ["b"]\n'
    (tmp_path / "hearth.toml").write_text(config)
    code, said = check(tmp_path)
    assert (code, "hearth pull org/not-pulled" in said) == (1, True)
    (tmp_path / "hearth.toml").write_text(f"allow_download = true\n{config}")
    code, said = check(tmp_path)
    assert (code, "hearth pull org/not-pulled" in said) == (0, True), "it is told all the same"
