"""The metaclass of the classes that `patch()` puts in the place of torch's."""

from typing_extensions import Protocol


# Protocol's metaclass is the base because `class Mine(torch.amp.GradScaler, Stateful)`, or with an
# ABC in Stateful's place, must stay possible. It brings an isinstance that asks issubclass.
class StandIn(type(Protocol)):  # type: ignore[misc]
    """Lets a subclass of a torch class answer isinstance and issubclass as that class does.

    While patched, instances and subclasses made before are still compared with the name that now
    means the subclass. Classes derived from a stand-in answer for themselves alone.
    """

    def __subclasscheck__(cls, subclass: type) -> bool:
        torch_class = vars(cls).get("_stands_for")
        if torch_class is None:
            return bool(super().__subclasscheck__(subclass))
        return issubclass(subclass, torch_class)
