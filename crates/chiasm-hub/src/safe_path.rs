//! Paths that lead nowhere but below the folder that they are put in.

/// Longest path of a file, in bytes.
const MAX_PATH: usize = 1024;

/// Whether a relative path stays below the folder that it is put in, and can be the name of a file.
pub(crate) fn is_safe_path(path: &str) -> bool {
    let is_part = |part: &str| !matches!(part, "" | "." | "..") && part.len() < MAX_PATH / 4;
    path.len() <= MAX_PATH
        && path.split('/').all(is_part)
        && !path.contains(|char: char| char.is_control() || char == '\\')
}
