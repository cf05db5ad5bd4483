"""The wheel says what a registry shows of a package."""

import shutil
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

import pg_idempotency


def test_the_wheel_has_licence_extras_and_version(tmp_path):
    source = Path(__file__).parent.parent
    shutil.copytree(source / "src", tmp_path / "source/src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(source / name, tmp_path / "source")
    subprocess.run(["/usr/bin/python3", "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation",
                    "--wheel-dir", tmp_path, "."], cwd=tmp_path / "source", check=True, timeout=60)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name.split("/")[-1]: name for name in wheel.namelist()}
        metadata = Parser().parsestr(wheel.read(names["METADATA"]).decode())
        assert "Permission to use, copy, modify" in wheel.read(names["LICENSE"]).decode()
    assert metadata["Version"] == pg_idempotency.__version__
    assert metadata["License"] == "PostgreSQL"
    assert set(metadata.get_all("Provides-Extra")) == {"pool", "sqlalchemy", "starlette", "fastapi", "flask", "django", "celery",
                                                       "opentelemetry"}
    assert "Typing :: Typed" in metadata.get_all("Classifier")
