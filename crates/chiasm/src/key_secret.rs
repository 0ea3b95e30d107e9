//! The secret of block keys that the frontends and agents of one fleet share.

use std::fmt::Display;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use chiasm_kv::KeySecret;

use crate::error::CliError;
use crate::state_folder;

/// The file in the state folder.
const NAME: &str = "block-key-secret";

/// Makes the secret of a file that of this process: of the one that is given, or of one in the
/// state folder, which is made if it is not there. Must come before the first block key is made.
pub(crate) fn share(file: Option<&Path>, state_dir: Option<&Path>) -> Result<(), CliError> {
    let secret = match file {
        Some(file) => read(file)?,
        None => {
            let folder = state_folder::path(state_dir)?;
            read_or_make(&folder)?
        }
    };
    secret.use_in_process().map_err(|error| CliError::Usage(error.to_string()))
}

fn read(path: &Path) -> Result<KeySecret, CliError> {
    let wrong = |reason: &dyn Display| {
        CliError::Usage(format!("--block-key-secret: {}: {reason}", path.display()))
    };
    let text = fs::read_to_string(path).map_err(|error| wrong(&error))?;
    let digits = text.trim();
    let byte = |at: usize| {
        digits.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok())
    };
    let bytes: Option<Vec<u8>> = (0..32).map(byte).collect();
    let bytes = bytes.and_then(|bytes| bytes.try_into().ok()).filter(|_| digits.len() == 64);
    let bytes = bytes
        .ok_or_else(|| wrong(&"expected 64 hex digits, as openssl rand -hex 32 prints them"))?;
    Ok(KeySecret::new(bytes))
}

fn read_or_make(folder: &Path) -> Result<KeySecret, CliError> {
    let path: PathBuf = folder.join(NAME);
    if !path.exists() {
        make(folder, &path).map_err(|error| {
            let path = path.display();
            CliError::Usage(format!(
                "can't write {path}: {error}; give another folder with --state-dir"
            ))
        })?;
    }
    read(&path)
}

/// Writes a random secret, all of it at once and for this user alone; without effect if another
/// process was first.
fn make(folder: &Path, path: &Path) -> io::Result<()> {
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
    fn the_secret_is_made_once_and_for_its_user_alone() {
        let folder = tempfile::tempdir().unwrap();
        let state = folder.path().join("a/b");
        let made = read_or_make(&state).unwrap();
        assert!(read_or_make(&state).unwrap() == made);
        let mode = fs::metadata(state.join(NAME)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn a_file_has_64_hex_digits() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        let digits = "0123456789abcdefABCDEF000000000000000000000000000000000000000042";
        for (text, is_one) in [
            (digits.to_owned(), true),
            (format!("{digits}\n"), true),
            (format!("{digits}00"), false),
            (digits[..62].to_owned(), false),
            (digits.replace('4', "g"), false),
            (digits.replace('4', "ä"), false),
            (String::new(), false),
        ] {
            fs::write(&path, &text).unwrap();
            assert_eq!(read(&path).is_ok(), is_one, "{text}");
        }
        assert!(read(&folder.path().join("none")).is_err());
    }
}
