//! A check that an untrusted relative path stays below its folder.

/// The maximum length of a file's path.
const MAX_PATH_BYTES: usize = 1024;

/// Returns `true` if a relative path stays below the folder it is joined to and can name a file.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && part.len() < MAX_PATH_BYTES / 4;
    path.len() <= MAX_PATH_BYTES
        && path.split('/').all(is_part)
        && !path.contains(|char: char| char.is_control() || char == '\\')
}
