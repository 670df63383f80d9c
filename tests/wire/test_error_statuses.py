"""The table of statuses covers every error, and each dialect's own rows are about errors that there are."""

from importlib import import_module

from contract.dialect_suite import failing, known_errors

from batchmill import errors
from batchmill.wire.calls import FUNCTION_ERROR, MODEL_CODES
from batchmill.wire.error_statuses import STATUSES, row_of, status_of, with_overrides

OWN = {
    "modelbit.dialect": ["STATUSES"],
    "native.dialect": ["STATUSES"],
    "ml_commons.dialect": ["STATUSES", "TYPES"],
    "predibase.errors": ["STATUSES", "LORAX_STATUSES"],
}


def test_every_code_has_a_row():
    """No error takes the status of a bug for want of a row: its code or a class below the root has one."""
    without_root = {code: status for code, status in STATUSES.items() if code != "internal_error"}
    errors_of_a_kind = [each for each in known_errors() if type(each) is not errors.BatchmillError]
    assert len(errors_of_a_kind) > 250
    assert failing(errors_of_a_kind, lambda error: "" if row_of(error, without_root) else "no row") == {}


def test_every_row_is_of_a_code():
    """A row for a code that nobody raises says nothing: no table has one."""
    codes = {error.code for error in known_errors()} | MODEL_CODES | {FUNCTION_ERROR}
    tables = {"wire.error_statuses": [STATUSES]}
    for name, attributes in OWN.items():
        module = import_module(f"batchmill.dialects.{name}")
        tables[name] = [getattr(module, each) for each in attributes]
    assert {name: extra for name, each in tables.items() if (extra := set().union(*each) - codes)} == {}


def test_the_nearest_row_counts():
    """A code's own row comes first, then its class's, then that of the class above; a dialect's row replaces one."""
    assert status_of(errors.Refused("x", code="link_used")) == 410
    assert status_of(errors.OverQuota("x")) == status_of(errors.Refused("x")) == 403
    assert status_of(errors.StorageFailed("x"), with_overrides({"paused": 409})) == 409
    assert status_of(errors.StorageFull("x"), with_overrides({"paused": 409})) == 503
