//! JPEG files that differ in a comment.

use std::error::Error;
use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

const START: [u8; 2] = [0xff, 0xd8];
const APP0: [u8; 2] = [0xff, 0xe0];
const COMMENT: [u8; 2] = [0xff, 0xfe];

/// A picture from which new files are made without encoding all of it again.
///
/// A new file has a comment segment with a number after the first segment. A decoder has to read
/// the whole file. The comment is padded so that the rest begins at a multiple of three bytes:
/// the base64 of the rest is the same in all files.
pub(crate) struct Picture {
    /// The new file's bytes before the number.
    head: Vec<u8>,
    /// The number of bytes, 0 to 2, after the number.
    padding: usize,
    /// The file after the comment, in base64.
    rest: Bytes,
}

impl Picture {
    /// Parses a JFIF file.
    pub(crate) fn new(file: &[u8]) -> Result<Self, Box<dyn Error>> {
        if !file.starts_with(&[START, APP0].concat()) {
            return Err("a picture is no JFIF file".into());
        }
        let after = 4 + usize::from(u16::from_be_bytes([file[4], file[5]]));
        let number = size_of::<u64>();
        let is_aligned = |padding: &usize| (after + 4 + number + padding).is_multiple_of(3);
        let padding = (0..3).find(is_aligned).unwrap_or_default();
        let length = u16::try_from(2 + number + padding)?.to_be_bytes();
        let head = [&file[..after], &COMMENT, &length].concat();
        Ok(Self { head, padding, rest: STANDARD.encode(&file[after..]).into() })
    }

    /// Returns the file with this number, in base64, in two pieces.
    pub(crate) fn numbered(&self, number: u64) -> [Bytes; 2] {
        let mut head = self.head.clone();
        head.extend(number.to_be_bytes());
        head.resize(head.len() + self.padding, b' ');
        [STANDARD.encode(head).into(), self.rest.clone()]
    }
}

/// Reads the JPEG files of a folder, in the order of their names.
pub(crate) fn read(folder: &Path) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let entries = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> =
        entries.filter(|path| path.extension() == Some("jpg".as_ref())).collect();
    paths.sort();
    if paths.is_empty() {
        return Err(format!("{} has no pictures", folder.display()).into());
    }
    Ok(paths.iter().map(fs::read).collect::<Result<_, _>>()?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn numbered_file_is_original_with_comment() {
        let file: Vec<u8> =
            [&START[..], &APP0, &[0, 4, 1, 2], &[0xff, 0xdb, 0, 3, 9], &[0xff, 0xd9]].concat();
        let picture = Picture::new(&file).unwrap();
        let numbered = |number| STANDARD.decode(picture.numbered(number).concat()).unwrap();
        let first = numbered(0x0102);
        assert_eq!(first[..8], file[..8]);
        assert_eq!(first[8..10], COMMENT);
        let length = usize::from(u16::from_be_bytes([first[10], first[11]]));
        assert_eq!(first[12..20], [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(first[10 + length..], file[8..]);
        assert_ne!(first, numbered(0x0103));
        assert!(Picture::new(b"GIF89a").is_err());
    }
}
