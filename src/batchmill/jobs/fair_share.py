"""Fair share between projects by what their rows cost, as virtual time: service divided by weight. Pure.

Every project that has work stands at a virtual time; the one furthest behind is served next. A project that comes
back after it had nothing to do begins where the others are: it has saved up nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WEIGHT_MIN = 1e-9  # a weight of nothing would never come to its turn


class FairShare:
    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._served: dict[str, float] = {}  # project -> virtual time
        self._active: set[str] = set()
        self._now = 0.0  # no project with work stands behind this

    def _weight(self, project: str) -> float:
        return max(self._weights.get(project, 1.0), WEIGHT_MIN)

    def set_active(self, projects: Iterable[str]) -> None:
        """These projects have work now, and no others."""
        projects = set(projects)
        staying = [self._served[project] for project in projects & self._active]
        if staying:
            self._now = max(self._now, min(staying))
        for project in projects - self._active:
            self._served[project] = max(self._served.get(project, 0.0), self._now)
        for project in [each for each in self._served if each not in projects and self._served[each] <= self._now]:
            del self._served[project]  # it would begin at `now` anyway
        self._active = projects

    def charge(self, project: str, cost: float) -> None:
        """Rows of this project were counted that cost so much."""
        self._served[project] = self._served.get(project, self._now) + cost / self._weight(project)

    def ahead(self, project: str, held: float = 0.0) -> float:
        """The virtual time of a project, what it holds at this moment taken as served."""
        return self._served.get(project, self._now) + held / self._weight(project)
