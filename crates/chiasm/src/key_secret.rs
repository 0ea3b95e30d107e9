//! The secret of block keys that the frontends and agents of one fleet share.

use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use chiasm_kv::KeySecret;

use crate::error::CliError;
use crate::state_folder;

/// The name of the file in the state folder.
const FILE_NAME: &str = "block-key-secret";

/// Loads this process's block key secret from `file`, or from a file in the state folder. Creates
/// the latter if it does not exist. Must be called before the first block key is computed.
pub(crate) fn load(file: Option<&Path>, state_dir: Option<&Path>) -> Result<(), CliError> {
    let secret = match file {
        Some(file) => read(file)?,
        None => {
            let folder = state_folder::path(state_dir)?;
            read_or_create(&folder)?
        }
    };
    secret.use_in_process().map_err(|error| CliError::Usage(error.to_string()))
}

/// Checks that a file has a secret.
pub(crate) fn check(path: &Path) -> Result<(), CliError> {
    read(path).map(drop)
}

fn read(path: &Path) -> Result<KeySecret, CliError> {
    let invalid = |reason: &dyn Display| {
        CliError::Usage(format!("--block-key-secret: {}: {reason}", path.display()))
    };
    let text = fs::read_to_string(path).map_err(|error| invalid(&error))?;
    let digits = text.trim();
    let byte = |at: usize| {
        digits.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok())
    };
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    let is_hex = digits.len() == 64 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok()).filter(|_| is_hex);
    let bytes = bytes
        .ok_or_else(|| invalid(&"expected 64 hex digits, as openssl rand -hex 32 prints them"))?;
    Ok(KeySecret::new(bytes))
}

fn read_or_create(folder: &Path) -> Result<KeySecret, CliError> {
    let path: PathBuf = folder.join(FILE_NAME);
    if !path.exists() {
        create(folder, &path).map_err(|error| {
            let path = path.display();
            CliError::Usage(format!(
                "can't write {path}: {error}; give another folder with --state-dir"
            ))
        })?;
    }
    read(&path)
}

/// Atomically writes a random secret that only this user can read. Does nothing if another process
/// was first.
fn create(folder: &Path, path: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    let digits: String =
        KeySecret::random().as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
    writeln!(file, "{digits}")?;
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => Err(error.error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn secret_is_created_once_for_user_only() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("a/b");
        let created = read_or_create(&state).unwrap();
        assert!(read_or_create(&state).unwrap() == created);
        let mode = fs::metadata(state.join(FILE_NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn secret_file_needs_64_hex_digits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let digits = "0123456789abcdefABCDEF000000000000000000000000000000000000000042";
        for (text, is_valid) in [
            (digits.to_owned(), true),
            (format!("{digits}\n"), true),
            (format!("{digits}00"), false),
            (digits[..62].to_owned(), false),
            (digits.replace('4', "g"), false),
            (digits.replace("01", "+1"), false),
            (digits.replace('4', "ä"), false),
            (String::new(), false),
        ] {
            fs::write(&path, &text).unwrap();
            assert_eq!(read(&path).is_ok(), is_valid, "{text}");
        }
        assert!(read(&folder.path().join("none")).is_err());
    }
}
