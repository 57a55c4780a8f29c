"""How every script here ends: exit code 0 passed, 1 failed, 77 skipped, and a plain last line."""
import importlib
import sys
import traceback


class Skip(Exception):
    """Why a script does not run on this machine."""


def need_packages(*names):
    """Imports the packages, or skips and says what to install. Names are import names or (import name, pip name)."""
    missing = []
    for name in names:
        module, pip = name if isinstance(name, tuple) else (name, name)
        try:
            importlib.import_module(module)
        except ImportError:
            missing.append(pip)
    if missing:
        raise Skip(f"pip install {' '.join(missing)}")


def finish(name, main):
    """Runs main() -> list of failures, prints the last line and exits."""
    try:
        failures = main()
    except Skip as reason:
        print(f"{name}: SKIPPED: {reason}", flush=True)
        sys.exit(77)
    except Exception:  # a script that breaks has failed
        traceback.print_exc()
        failures = ["the script itself broke: see above"]
    for failure in failures:
        print(f"  FAILED: {failure}")
    print(f"{name}: {'FAILED, ' + str(len(failures)) + ' checks' if failures else 'passed'}", flush=True)
    sys.exit(1 if failures else 0)
