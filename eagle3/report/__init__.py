"""The comparison report: tables and figures from what the stages wrote, as one HTML page and as Markdown."""
