"""Every way in which the package says no.  Each message is a letter: what, expected, got, what to do."""


class BadInput(ValueError):
    """The data or the settings cannot be used as they are."""


class UnsupportedModel(ValueError):
    """The model is outside what the engines can integrate, or it is not a fixed density."""


class NotPositiveDefinite(ArithmeticError):
    """A matrix that the theory says is positive definite is not."""


class NotAMode(ArithmeticError):
    """The point that was reached is not an interior maximum of the log joint density."""


class NotSmooth(NotAMode):
    """The log density has a corner, or a wrong second derivative, where its curvature is needed."""


class ImproperPosterior(ArithmeticError):
    """The log joint density has no maximum at a finite point, or is flat along a direction."""


class TooLarge(MemoryError):
    """A dense matrix would not fit into memory."""


class NotWritten(OSError):
    """A file could not be written; the one that was there before is as it was."""


class NotConverged(RuntimeError):
    """The iteration stopped for another reason than convergence.

    :ivar posterior: the posterior at the last good state, or None when there was none.
    """

    def __init__(self, message: str, posterior: object = None) -> None:
        super().__init__(message)
        self.posterior = posterior
