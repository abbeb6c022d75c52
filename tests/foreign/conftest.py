from tests.over_fakes import chat_model, model, no_lost_errors, nodes_come_back_soon

__all__ = ["chat_model", "model", "no_lost_errors", "nodes_come_back_soon"]
