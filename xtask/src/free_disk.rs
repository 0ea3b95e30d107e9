//! Free disk space, read from `df -P`, whose output format is fixed by POSIX.

use std::path::Path;
use std::process::Command;

use crate::child;
use crate::error::Error;

/// Returns the number of bytes that this user may still write at `path`, which has to exist.
pub(crate) fn free_bytes(path: &Path) -> Result<u64, Error> {
    let what = "df -Pk";
    let printed = child::read(Command::new("df").arg("-Pk").arg(path), what)?;
    available_kib(&printed)
        .map(|kib| kib * 1024)
        .ok_or_else(|| Error::Unreadable { what: what.to_owned(), printed })
}

/// Parses the available KiB from the last line: the column in front of the capacity in per cent.
/// Columns can't be counted from the left, because a device name may contain spaces.
fn available_kib(printed: &str) -> Option<u64> {
    let columns: Vec<&str> = printed.lines().last()?.split_whitespace().collect();
    let capacity = columns.iter().position(|column| column.ends_with('%'))?;
    columns[..capacity].last()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_column_is_found_beside_spaces() {
        let head = "Filesystem     1024-blocks     Used Available Capacity Mounted on\n";
        let plain = "/dev/vda       264122368 18874368  77594624      20% /";
        assert_eq!(available_kib(&format!("{head}{plain}")), Some(77_594_624));
        let spaces = "my nas:/a b  100 20 80 20% /mnt/a b";
        assert_eq!(available_kib(&format!("{head}{spaces}")), Some(80));
        assert_eq!(available_kib(head), None);
        assert_eq!(available_kib(""), None);
    }

    #[test]
    fn df_reports_existing_directory_only() {
        let dir = tempfile::tempdir().unwrap();
        assert!(free_bytes(dir.path()).is_ok());
        assert!(free_bytes(&dir.path().join("missing")).is_err());
    }
}
