//! JPEG and PNG files that differ in a comment.

use std::error::Error;
use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;

const START: [u8; 2] = [0xff, 0xd8];
const APP0: [u8; 2] = [0xff, 0xe0];
const COMMENT: [u8; 2] = [0xff, 0xfe];

const PNG_START: [u8; 8] = *b"\x89PNG\r\n\x1a\n";
/// The length of a PNG file's signature and first chunk, which has a fixed length.
const PNG_HEAD_BYTES: usize = PNG_START.len() + 25;
/// The type of a text chunk of PNG, and the keyword of the text.
const PNG_COMMENT: &[u8] = b"tEXtn\0";

/// The format of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Jpeg,
    Png,
}

impl Format {
    /// Both formats.
    pub(crate) const ALL: [Self; 2] = [Self::Jpeg, Self::Png];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Jpeg => "JPEG",
            Self::Png => "PNG",
        }
    }

    /// Returns the extension of files.
    fn extension(self) -> &'static str {
        match self {
            Self::Jpeg => "jpg",
            Self::Png => "png",
        }
    }

    /// Returns the beginning of the URL of a picture in the body.
    pub(crate) fn data_uri(self) -> &'static str {
        match self {
            Self::Jpeg => "data:image/jpeg;base64,",
            Self::Png => "data:image/png;base64,",
        }
    }
}

/// A picture from which new files are made without encoding all of it again.
///
/// A new file has a comment with a number after the first segment or chunk. A decoder has to read
/// the whole file. The comment is padded so that the rest begins at a multiple of three bytes:
/// the base64 of the rest is the same in all files.
pub(crate) struct Picture {
    format: Format,
    /// The new file's bytes before the number.
    head: Vec<u8>,
    /// The number of bytes, 0 to 2, after the number.
    padding: usize,
    /// The file after the comment, in base64.
    rest: Bytes,
}

impl Picture {
    /// Parses a JFIF or PNG file.
    pub(crate) fn new(file: &[u8]) -> Result<Self, Box<dyn Error>> {
        if file.starts_with(&PNG_START) && file.len() > PNG_HEAD_BYTES {
            return Ok(Self::from_png(file));
        }
        if !file.starts_with(&[START, APP0].concat()) {
            return Err("a picture is neither a JFIF nor a PNG file".into());
        }
        let after = 4 + usize::from(u16::from_be_bytes([file[4], file[5]]));
        let number = size_of::<u64>();
        let is_aligned = |padding: &usize| (after + 4 + number + padding).is_multiple_of(3);
        let padding = (0..3).find(is_aligned).unwrap_or_default();
        let length = u16::try_from(2 + number + padding)?.to_be_bytes();
        let head = [&file[..after], &COMMENT, &length].concat();
        let rest = STANDARD.encode(&file[after..]).into();
        Ok(Self { format: Format::Jpeg, head, padding, rest })
    }

    fn from_png(file: &[u8]) -> Self {
        let (head, rest) = file.split_at(PNG_HEAD_BYTES);
        let digits = 2 * size_of::<u64>();
        let checksum = size_of::<u32>();
        let before = head.len() + size_of::<u32>() + PNG_COMMENT.len() + digits;
        let is_aligned = |padding: &usize| (before + padding + checksum).is_multiple_of(3);
        let padding = (0..3).find(is_aligned).unwrap_or_default();
        // Without the four bytes of the type.
        let length = (PNG_COMMENT.len() - 4 + digits + padding) as u32;
        let head = [head, &length.to_be_bytes(), PNG_COMMENT].concat();
        Self { format: Format::Png, head, padding, rest: STANDARD.encode(rest).into() }
    }

    /// Returns the file with this number, in base64, in two pieces.
    pub(crate) fn numbered(&self, number: u64) -> [Bytes; 2] {
        let mut head = self.head.clone();
        match self.format {
            Format::Jpeg => head.extend(number.to_be_bytes()),
            Format::Png => head.extend(format!("{number:016x}").bytes()),
        }
        head.resize(head.len() + self.padding, b' ');
        if self.format == Format::Png {
            let checksum = crc32fast::hash(&head[PNG_HEAD_BYTES + size_of::<u32>()..]);
            head.extend(checksum.to_be_bytes());
        }
        [STANDARD.encode(head).into(), self.rest.clone()]
    }
}

/// Reads the files of a format in a folder, in the order of their names.
pub(crate) fn read(folder: &Path, format: Format) -> Result<Vec<Vec<u8>>, Box<dyn Error>> {
    let entries = fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> =
        entries.filter(|path| path.extension() == Some(format.extension().as_ref())).collect();
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

    #[test]
    fn numbered_png_is_original_with_text_chunk() {
        let file = [&PNG_START[..], &[7; 25], b"the rest"].concat();
        let picture = Picture::new(&file).unwrap();
        let numbered = |number| STANDARD.decode(picture.numbered(number).concat()).unwrap();
        let first = numbered(0x0102);
        assert_eq!(first[..33], file[..33]);
        let length = u32::from_be_bytes(first[33..37].try_into().unwrap()) as usize;
        let chunk = &first[37..41 + length];
        assert!(chunk.starts_with(b"tEXtn\x000000000000000102"));
        let checksum = u32::from_be_bytes(first[41 + length..45 + length].try_into().unwrap());
        assert_eq!(checksum, crc32fast::hash(chunk));
        assert_eq!(&first[45 + length..], b"the rest");
        assert_ne!(first, numbered(0x0103));
    }
}
