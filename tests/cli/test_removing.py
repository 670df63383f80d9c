"""`batchmill jobs rm` and `jobs prune`."""

import json
import time


def ended(view, job_id, finished=1.0):
    return view(id=job_id, state="completed", finished=finished)


def test_jobs_are_removed_by_id(app, call, view):
    """Each job is removed and said to be; one that cannot be does not keep the others, and is exit code 1."""
    app.jobs.add(ended(view, "job_1")).add(view(id="job_2")).add(ended(view, "job_3"))
    result = call("jobs", "rm", "job_1", "job_2", "job_3")
    assert result.exit_code == 1 and list(app.jobs.views) == ["job_2"]
    assert "job_1: removed" in result.stdout and "job_3: removed" in result.stdout
    assert "job_2 is running" in result.stderr
    assert call("jobs", "rm", "job_2").exit_code == 2


def test_jobs_go_by_their_age(app, call, view):
    """Ended jobs older than the age go; others stay, and --dry-run removes none."""
    now = time.time()
    app.jobs.add(ended(view, "job_1", now - 3 * 86_400)).add(ended(view, "job_2", now - 3600))
    app.jobs.add(view(id="job_3", state="paused"))
    dry = call("jobs", "prune", "--older-than", "2d", "--dry-run", "--json")
    assert [json.loads(line)["job"]["id"] for line in dry.stdout.splitlines()] == ["job_1"] and len(app.jobs.views) == 3
    assert "1 job ended so long ago" in call("jobs", "prune", "--older-than", "2d").stdout
    assert list(app.jobs.views) == ["job_2", "job_3"]
    refused = call("jobs", "prune", "--older-than", "two days")
    assert refused.exit_code == 2 and "90d" in refused.stderr


def test_without_a_verb_jobs_are_listed(app, call, view):
    """`jobs` alone lists them, as before."""
    app.jobs.add(view(id="job_1"))
    assert "job_1" in call("jobs").stdout
