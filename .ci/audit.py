"""Reads pip-audit's JSON report: status 1 if a package has a known vulnerability that a newer version mends.

    pip-audit … --format json | python3 .ci/audit.py

A service or an index that cannot be reached fails nothing; it is said.
"""

from __future__ import annotations

import json
import sys


def verdict(report: str) -> tuple[int, list[str]]:
    """(exit status, lines to print) for what pip-audit wrote, or for nothing."""
    try:
        packages = json.loads(report)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return 0, ["audit: nothing was audited: pip-audit could not be installed or gave no report"]
    audited = [package for package in packages if "vulns" in package]
    if not audited:
        return 0, [
            f"audit: none of {len(packages)} packages was audited: the service does not know them here"
        ]
    lines, status = [f"audit: {len(audited)} of {len(packages)} packages audited"], 0
    for package in audited:
        for found in package["vulns"]:
            fixes = ", ".join(found["fix_versions"])
            status = status or int(bool(fixes))
            lines.append(
                f"audit: {package['name']} {package['version']}: {found['id']}, "
                + (f"mended in {fixes}: raise it in constraints.txt" if fixes else "no version mends it")
            )
    return status, lines


if __name__ == "__main__":
    status, lines = verdict(sys.stdin.read())
    print("\n".join(lines))
    sys.exit(status)
