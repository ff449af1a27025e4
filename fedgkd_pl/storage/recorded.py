"""Objects that remember what they were made with, so that a run can write it down."""

import inspect
from typing import Any, Self

GIVEN = "_given"  # in an object's __dict__: copies and pickles take it along


class Recorded:
    """Remembers its constructor's arguments; a base of all that a config may describe."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Keeps the arguments, which go on to ``__init__``."""
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        made = super().__new__(cls)
        made.__dict__[GIVEN] = (args, kwargs)
        return made

    def __repr__(self) -> str:
        """The call that makes such an object."""
        values = ", ".join(f"{name}={value!r:.80}" for name, value in given(self).items())
        return f"{type(self).__name__}({values})"


def given(made: Recorded) -> dict[str, Any]:
    """The arguments that an object was made with, by name; defaults are not among them."""
    args, kwargs = vars(made).get(GIVEN, ((), {}))
    bound = inspect.signature(type(made).__init__).bind_partial(made, *args, **kwargs)
    values = dict(list(bound.arguments.items())[1:])  # without ``self``
    for name, parameter in bound.signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            values |= values.pop(name, {})
    return values
