"""Shows results: tables, figures, one HTML page. Must not know how anything was measured."""
