"""Columns of the failure table as the tests write them, and the site that their cases take place on."""

from rollout_failures import Call, CallContext, Failure, Fault

START = "http://shop.test/start"
ELSEWHERE = "http://made-up.test/"

# Whose fault, whether a fresh attempt may help, whether this attempt is over.
ENVIRONMENT = (Fault.ENVIRONMENT, True, True)
PASSING = (Fault.ENVIRONMENT, False, False)
POLICY = (Fault.POLICY, False, False)
POLICY_WRECK = (Fault.POLICY, False, True)
MEASUREMENT = (Fault.MEASUREMENT, False, True)
MEASUREMENT_AGAIN = (Fault.MEASUREMENT, True, True)


def columns(failure: Failure) -> tuple[Fault, bool, bool]:
    """Return the failure's columns."""
    return failure.fault, failure.retryable, failure.fatal


def context(call: Call, policy_url: str | None = None, acted: bool = True) -> CallContext:
    """Return the context of a call in an episode that began at START."""
    return CallContext(call, START, policy_url, acted)
