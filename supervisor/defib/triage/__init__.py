"""Floor 1, pure: reads text. Bytes to lines, lines to records, records to findings, findings to a verdict."""
