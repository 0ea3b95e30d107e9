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

/// A picture whose file can be made a new one without encoding all of it again.
///
/// A comment segment after the first, its bytes the new file's number: another file, of which a
/// decoder has to read all. It is as long as it must be for what follows to begin at a multiple of
/// three bytes, so the base64 of the rest is always the same.
pub struct Picture {
    /// The new file's bytes before the comment's number.
    head: Vec<u8>,
    /// Number of bytes, 0 to 2, that fill the comment up after the number.
    padding: usize,
    /// The file after the comment, in base64.
    rest: Bytes,
}

impl Picture {
    /// Creates it of a JFIF file.
    ///
    /// # Errors
    /// It is none.
    pub fn new(file: &[u8]) -> Result<Self, Box<dyn Error>> {
        if !file.starts_with(&[START, APP0].concat()) {
            return Err("a picture is no JFIF file".into());
        }
        let after = 4 + usize::from(u16::from_be_bytes([file[4], file[5]]));
        let number = size_of::<u64>();
        let padding = (0..3).find(|padding| (after + 4 + number + padding).is_multiple_of(3)).unwrap_or_default();
        let length = u16::try_from(2 + number + padding)?.to_be_bytes();
        let head = [&file[..after], &COMMENT, &length].concat();
        Ok(Self { head, padding, rest: STANDARD.encode(&file[after..]).into() })
    }

    /// The file with this number in it, in base64, in two pieces.
    pub fn numbered(&self, number: u64) -> [Bytes; 2] {
        let mut head = self.head.clone();
        head.extend(number.to_be_bytes());
        head.resize(head.len() + self.padding, b' ');
        [STANDARD.encode(head).into(), self.rest.clone()]
    }
}

/// Reads the JPEG files of a folder, in the order of their names.
///
/// # Errors
/// There are none, or one can't be read.
pub fn read(folder: &Path) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let entries: Result<Vec<_>, _> =
        fs::read_dir(folder)?.map(|entry| Ok::<_, Box<dyn Error>>(entry?.path())).collect();
    let mut paths = entries?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "jpg"));
    paths.sort();
    if paths.is_empty() {
        return Err("the folder has no pictures".into());
    }
    Ok(paths.iter().map(fs::read).collect::<Result<_, _>>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    fn numbered_files_are_the_file_with_a_comment() {
        let file: Vec<u8> = [&START[..], &APP0, &[0, 4, 1, 2], &[0xff, 0xdb, 0, 3, 9], &[0xff, 0xd9]].concat();
        let picture = Picture::new(&file).unwrap();
        let numbered = |number| STANDARD.decode(picture.numbered(number).concat()).unwrap();
        let one = numbered(0x0102);
        assert_eq!(one[..8], file[..8]);
        assert_eq!(one[8..10], COMMENT);
        let length = usize::from(u16::from_be_bytes([one[10], one[11]]));
        assert_eq!(one[12..20], [0, 0, 0, 0, 0, 0, 1, 2]);
        assert_eq!(one[10 + length..], file[8..]);
        assert_ne!(one, numbered(0x0103));
        assert!(Picture::new(b"GIF89a").is_err());
    }
}
