from tests.over_fakes import model

__all__ = ["model"]
