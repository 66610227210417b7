"""The files of docs/deploy: units, a manifest, a batch script, images, settings. They parse, and every flag and setting in them exists."""

import re
import shutil
import subprocess
import tomllib
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.commands import COMMANDS
from engine.commands.line import _parse
from engine.settings import SETTINGS, resolve

DEPLOY = Path(__file__).resolve().parent.parent / "docs" / "deploy"
UNITS = ("forebay-head.service", "forebay-node.service")


def check_line(words: list[str]) -> dict[str, object]:
    """A `forebay` command line parses, flag by flag, and its settings are taken; returns the options."""
    [command] = [each for each in COMMANDS if each.name == words[0]]
    options = _parse(command, words[1:])
    resolve({name: None if name in ("api_key_file", "key_file", "config") else value for name, value in options.items()}, {})
    return options


def unit(name: str) -> ConfigParser:
    parser = ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names of units are not lowered
    parser.read_string((DEPLOY / name).read_text())
    return parser


@pytest.mark.parametrize("name", UNITS)
def test_units_start_again_and_their_command_exists(name: str) -> None:
    """Sections and keys as systemd has them; the process is started again whatever ended it; its command line parses."""
    parsed = unit(name)
    assert parsed.sections() == ["Unit", "Service", "Install"]
    assert parsed["Service"]["Restart"] == "always"
    assert parsed["Unit"]["StartLimitIntervalSec"] == "0"
    assert parsed["Install"]["WantedBy"] == "multi-user.target"
    program, *words = parsed["Service"]["ExecStart"].split()
    assert Path(program).name == "forebay"
    options = check_line(words)
    assert (options.get("listen") is not None) == (name == "forebay-node.service")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze here")
@pytest.mark.parametrize("name", UNITS)
def test_systemd_takes_the_units(name: str) -> None:
    """Its own check finds nothing but the program that is not installed here."""
    done = subprocess.run(["systemd-analyze", "verify", str(DEPLOY / name)], capture_output=True, text=True, check=False)
    wrong = [line for line in done.stderr.splitlines() if name in line and "not executable" not in line and "Command" not in line]
    assert not wrong


def test_the_settings_are_settings() -> None:
    """Every key of the TOML file is one, and its values are taken, but for the files of another machine."""
    held = tomllib.loads((DEPLOY / "cluster.toml").read_text())
    assert set(held) <= set(SETTINGS)
    settings = resolve({name: str(value) for name, value in held.items()}, {})
    assert len(settings.cluster.nodes) + 1 == len(settings.engine.stages.split(","))


def test_the_manifest_is_yaml_and_its_command_exists() -> None:
    """One RayJob, whose entry point parses; images and volumes are named where they are used."""
    [job] = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *words = job["spec"]["entrypoint"].split()
    assert program == "forebay"
    assert check_line(words)["cluster"] == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod: dict[str, Any] = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert container["image"] == "forebay:cuda"
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    stages = str(check_line(words)["stages"]).split(",")
    assert sum(group["replicas"] for group in cluster["workerGroupSpecs"]) == len(stages) - 1


def test_the_batch_script_is_bash_and_its_commands_exist() -> None:
    """bash reads it without a word, and both command lines parse once its variables have values."""
    script = DEPLOY / "slurm.sh"
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = script.read_text().replace("\\\n", " ")
    lines = re.findall(r'(?:\$FOREBAY|"\$FOREBAY") (node|serve) (.*?)(?:;|$)', text, re.MULTILINE)
    assert [name for name, _ in lines] == ["node", "serve"]
    given = {"$NODE_LIST": "a:7000", "$MODEL": "m", "$PORT": "7000", "$STAGES": "40,38", "$STAGE": "0", "$KEY": "key"}
    for name, rest in lines:
        rest = re.sub(r"\$\{SLURM_SUBMIT_DIR:-\.\}", ".", rest)
        for variable, value in given.items():
            rest = rest.replace(variable, value)
        check_line([name, *rest.replace('"', "").split()])


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.rocm"])
def test_images_copy_what_there_is_and_start_what_exists(name: str) -> None:
    """Instructions are Docker's, every path that is copied is in the repository, and what starts parses."""
    text = re.sub(r"\\\n", " ", (DEPLOY / name).read_text())
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert {word for word, _ in instructions} <= {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "ENV", "EXPOSE", "ENTRYPOINT", "CMD"}
    assert instructions[0][0] == "FROM"
    for word, rest in instructions:
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((DEPLOY.parent.parent / source).exists() for source in sources)
    held = dict(instructions)
    assert yaml.safe_load(held["ENTRYPOINT"]) == ["forebay"]
    check_line(yaml.safe_load(held["CMD"]))
    assert "not built where this was written" in text or "was built where this was written" in text
