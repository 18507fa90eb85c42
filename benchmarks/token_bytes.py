"""What a token of recorded rollouts takes on the disk: `python -m benchmarks.token_bytes STORE`.

Looks at the table `messages` of a store and prints the compressed bytes of its columns for each token: of its files as
they are, of the same rows written file by file by today's writer, and of all rows in one file, as compaction leaves
them. "Tokens" are the four columns with a value for each token: token ids, both masks, log-probs.
"""

import sys
from collections import Counter
from collections.abc import Iterable

import pyarrow as pa
import pyarrow.parquet as pq

from storage.delta.parquet import buffer_reader, encode
from storage.store import open_store

PER_TOKEN = ("token_ids", "mask", "is_content", "logprobs")


def main() -> None:
    """Print the table for one store."""
    table = open_store(sys.argv[1], read_only=True).slices.table("messages")
    files = [each.path for each in table.active_files()]
    rows = [table.read(path) for path in files]
    tokens = sum(len(column.combine_chunks().flatten()) for column in (each["token_ids"] for each in rows))
    forms = {
        "as it is": [table.load(path) for path in files],
        "file by file": [encode([each]) for each in rows],
        "in one file": [encode([pa.concat_tables(rows).combine_chunks()])],
    }
    print(f"{len(files)} files, {sum(each.num_rows for each in rows)} messages, {tokens} tokens\n")
    print(f"| written | {' | '.join(PER_TOKEN)} | tokens | other columns | footers | whole |")
    print("|---|" + "---:|" * (len(PER_TOKEN) + 4))
    for name, data in forms.items():
        columns = column_bytes(data)
        of_tokens = sum(columns[each] for each in PER_TOKEN)
        whole = sum(map(len, data))
        sizes = [*(columns[each] for each in PER_TOKEN), of_tokens, columns.total() - of_tokens]
        print(f"| {name} | {' | '.join(f'{size / tokens:.2f}' for size in (*sizes, whole - columns.total(), whole))} |")


def column_bytes(files: Iterable[bytes]) -> Counter[str]:
    """The compressed bytes of every column over some Parquet files."""
    found: Counter[str] = Counter()
    for data in files:
        metadata = pq.ParquetFile(buffer_reader(data)).metadata
        for group in range(metadata.num_row_groups):
            for number in range(metadata.num_columns):
                column = metadata.row_group(group).column(number)
                found[column.path_in_schema.split(".")[0]] += column.total_compressed_size
    return found


if __name__ == "__main__":
    main()
