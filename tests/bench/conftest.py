from tests.over_fakes import model, no_lost_errors, nodes_come_back_soon

__all__ = ["model", "no_lost_errors", "nodes_come_back_soon"]
