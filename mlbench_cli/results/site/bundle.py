"""The code for judging archives in a browser: the judge with its imports, and Pyodide.

Pyodide (https://pyodide.org, MPL-2.0) is CPython for WebAssembly. It is not part of mlbench: `site build --pyodide`
takes the package of the npm registry, `npm pack pyodide@VERSION`, whose digest is below.
"""

import base64
import hashlib
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from mlbench_cli import __version__, isolation
from mlbench_cli.errors import NotFoundError, UsageError

PYODIDE = "314.0.7"
# `npm view pyodide@314.0.7 dist.integrity`, which is also the digest of the file that `npm pack` writes.
PYODIDE_SHA512 = "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
PYODIDE_FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")
MAX_PYODIDE_BYTES = 64 << 20
NOTICE = f"""This folder holds five unmodified files of the npm package pyodide {PYODIDE}.

Pyodide is under the Mozilla Public License 2.0 (https://www.mozilla.org/MPL/2.0/); its source is at
https://github.com/pyodide/pyodide, tag {PYODIDE}. It contains CPython, under the PSF License
(https://docs.python.org/3/license.html), and libraries compiled into it, whose licenses are in its source.
"""
_CLOSURE = """
import json, sys
import mlbench_cli.results.site.judge_here, mlbench_cli.util.yaml_text, task_images.comm.presets
from mlbench_cli.tasks.catalog import load_catalog
load_catalog()
own = [module.__file__ for name, module in sys.modules.items()
       if name.partition('.')[0] in ('mlbench_cli', 'task_images', 'providers') and getattr(module, '__file__', None)]
import yaml
print(json.dumps([own, yaml.__file__]))
"""


class Judge(NamedTuple):
    """A judge on the site: judges/VERSION-DIGEST.zip."""

    file: str
    sha256: str
    mlbench: str


def write_judge(site: Path) -> Judge:
    """Write the judge of this mlbench as a zip: equal code gives equal bytes."""
    data = make_judge()
    sha256 = hashlib.sha256(data).hexdigest()
    file = f"judges/{__version__}-{sha256[:12]}.zip"
    (site / "judges").mkdir(parents=True, exist_ok=True)
    (site / file).write_bytes(data)
    return Judge(file, sha256, __version__)


def make_judge() -> bytes:
    """A zip of the modules that judging imports (found by a fresh interpreter), task descriptions, and PyYAML's Python
    code."""
    code = f"import sys; sys.path.insert(0, {isolation.ROOT!r}){_CLOSURE}"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    own, yaml_file = json.loads(done.stdout)
    root, yaml_folder = Path(isolation.ROOT), Path(yaml_file).parent
    files = {Path(file).relative_to(root).as_posix(): Path(file) for file in own}
    files |= {path.relative_to(root).as_posix(): path for path in root.glob("task_images/*/task.yaml")}
    files |= {f"yaml/{path.name}": path for path in yaml_folder.glob("*.py")}
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as zipped:
        for name in sorted(files):
            info = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            zipped.writestr(info, files[name].read_bytes(), compresslevel=9)
    return target.getvalue()


def unpack_pyodide(package: Path, site: Path) -> None:
    """Extract the five files that a page needs from the npm package. Raises NotFoundError, or UsageError for another
    package."""
    hint = f"npm pack pyodide@{PYODIDE}, then --pyodide pyodide-{PYODIDE}.tgz"
    try:
        data = package.read_bytes()
    except FileNotFoundError:
        raise NotFoundError(f"There is no file {package}.", hint=hint) from None
    except OSError as error:
        raise UsageError(f"{package} cannot be read: {error.strerror or error}.", hint=hint) from None
    found = base64.b64encode(hashlib.sha512(data).digest()).decode()
    if found != PYODIDE_SHA512:
        raise UsageError(
            f"{package} is not the npm package pyodide {PYODIDE}: its SHA-512 is {found[:16]}..., not "
            f"{PYODIDE_SHA512[:16]}....",
            hint=hint,
        )
    folder = site / "pyodide"
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:gz") as packed:
        for name in PYODIDE_FILES:
            file = packed.extractfile(f"package/{name}")
            assert file is not None
            (folder / name).write_bytes(file.read(MAX_PYODIDE_BYTES))
    (folder / "NOTICE.txt").write_text(NOTICE, "utf-8")
