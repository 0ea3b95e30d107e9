//! The text chunks of a PNG that may hold EXIF or XMP. All text chunks are checked, because Pillow
//! refuses files with some malformed ones.

use std::io::Read;

use flate2::read::ZlibDecoder;

/// The maximum expanded size in bytes of a compressed text or profile: Pillow's `MAX_TEXT_CHUNK`.
const MAX_EXPANDED_BYTES: u64 = 1 << 20;
/// The maximum size in bytes of all texts of a file: Pillow's `MAX_TEXT_MEMORY`.
const MAX_TOTAL_BYTES: u64 = 64 << 20;
/// The maximum size in bytes of all compressed texts and profiles of a file, compressed plus
/// expanded.
///
/// Pillow has no such limit, and may expand a file by a factor of a thousand. Here the expansion is
/// part of reading the header, whose CPU time is not accounted for.
const MAX_EXPANSION_BYTES: u64 = 8 << 20;

/// The error for a text chunk for which Pillow raises.
#[derive(Debug)]
pub(super) struct Refused;

/// A value of the image's `info` in Pillow.
enum Text {
    /// A value that Pillow stores as bytes.
    Bytes(Vec<u8>),
    /// A value that Pillow stores as a string. It cannot search strings for EXIF or XMP.
    String,
}

/// The texts with the keywords that may hold the orientation. A later chunk replaces an earlier
/// one.
#[derive(Default)]
pub(super) struct Texts {
    exif: Option<Text>,
    raw_profile: Option<Vec<u8>>,
    xmp: Option<Text>,
    xml_com_adobe_xmp: Option<Vec<u8>>,
    /// The size of all texts in bytes.
    total_bytes: u64,
    /// The size of all compressed texts in bytes, compressed plus expanded.
    expansion_bytes: u64,
}

impl Texts {
    /// Reads an `eXIf` chunk.
    pub(super) fn exif_chunk(&mut self, content: &[u8]) {
        self.exif = Some(Text::Bytes([b"Exif\0\0", content].concat()));
    }

    /// Reads a `tEXt` chunk.
    pub(super) fn plain(&mut self, content: &[u8]) -> Result<(), Refused> {
        let (keyword, value) = split_at_nul(content).unwrap_or((content, &[]));
        if keyword == b"exif" {
            self.count_text(value.len())?;
            self.exif = Some(Text::Bytes(value.to_vec()));
            return Ok(());
        }
        self.store(keyword, value.to_vec())
    }

    /// Reads a `zTXt` chunk.
    pub(super) fn compressed(&mut self, content: &[u8]) -> Result<(), Refused> {
        let (keyword, value) = split_at_nul(content).unwrap_or((content, &[]));
        let value = match value {
            [] => Vec::new(),
            [0, compressed @ ..] => self.expand(compressed)?.unwrap_or_default(),
            _ => return Err(Refused),
        };
        self.store(keyword, value)
    }

    /// Reads an `iTXt` chunk. Malformed ones are ignored.
    pub(super) fn international(&mut self, content: &[u8]) -> Result<(), Refused> {
        let Some((keyword, [is_compressed, method, rest @ ..])) = split_at_nul(content) else {
            return Ok(());
        };
        let Some((language, rest)) = split_at_nul(rest) else {
            return Ok(());
        };
        let Some((translated, value)) = split_at_nul(rest) else {
            return Ok(());
        };
        let value = match (is_compressed, method) {
            (0, _) => value.to_vec(),
            (_, 0) => match self.expand(value)? {
                Some(value) => value,
                None => return Ok(()),
            },
            _ => return Ok(()),
        };
        if keyword == b"XML:com.adobe.xmp" {
            self.xmp = Some(Text::Bytes(value.clone()));
        }
        if [language, translated, &value].iter().any(|text| std::str::from_utf8(text).is_err()) {
            return Ok(());
        }
        self.store(keyword, value)
    }

    /// Checks that Pillow accepts an `iCCP` chunk.
    pub(super) fn colour_profile(&mut self, content: &[u8]) -> Result<(), Refused> {
        match split_at_nul(content) {
            Some((_, [0, compressed @ ..])) => self.expand(compressed).map(drop),
            _ => Err(Refused),
        }
    }

    /// Stores a text if its keyword may hold the orientation.
    fn store(&mut self, keyword: &[u8], value: Vec<u8>) -> Result<(), Refused> {
        if keyword.is_empty() {
            return Ok(());
        }
        self.count_text(value.len())?;
        match keyword {
            b"exif" => self.exif = Some(Text::String),
            b"xmp" => self.xmp = Some(Text::String),
            b"Raw profile type exif" => self.raw_profile = Some(value),
            b"XML:com.adobe.xmp" => self.xml_com_adobe_xmp = Some(value),
            _ => {}
        }
        Ok(())
    }

    fn count_text(&mut self, length: usize) -> Result<(), Refused> {
        self.total_bytes += length as u64;
        if self.total_bytes > MAX_TOTAL_BYTES { Err(Refused) } else { Ok(()) }
    }

    /// Expands a zlib stream. Returns `None` for a broken stream.
    fn expand(&mut self, compressed: &[u8]) -> Result<Option<Vec<u8>>, Refused> {
        self.count_expansion(compressed.len())?;
        let mut expanded = Vec::new();
        let outcome =
            ZlibDecoder::new(compressed).take(MAX_EXPANDED_BYTES + 1).read_to_end(&mut expanded);
        if expanded.len() as u64 > MAX_EXPANDED_BYTES {
            return Err(Refused);
        }
        self.count_expansion(expanded.len())?;
        match outcome {
            Ok(_) => Ok(Some(expanded)),
            // Pillow keeps the output of a truncated stream.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(Some(expanded)),
            Err(_) => Ok(None),
        }
    }

    fn count_expansion(&mut self, length: usize) -> Result<(), Refused> {
        self.expansion_bytes += length as u64;
        if self.expansion_bytes > MAX_EXPANSION_BYTES { Err(Refused) } else { Ok(()) }
    }

    /// Returns the orientation in these texts, 1 to 8.
    pub(super) fn orientation(&self) -> u8 {
        let exif = match (&self.exif, &self.raw_profile) {
            (Some(Text::Bytes(exif)), _) => Some(exif.clone()),
            // Pillow cannot read a string as EXIF, and vLLM ignores the error.
            (Some(Text::String), _) => return 1,
            (None, Some(profile)) => match hex_profile(profile) {
                Some(exif) => Some(exif),
                None => return 1,
            },
            (None, None) => None,
        };
        let xmp = match (&self.xml_com_adobe_xmp, &self.xmp) {
            (Some(packet), _) if !packet.is_empty() => Some(packet),
            (_, Some(Text::Bytes(packet))) => Some(packet),
            // Pillow fails likewise when it searches a string. It does not search if the EXIF block
            // has the tag.
            (_, Some(Text::String)) | (_, None) => None,
        };
        crate::image::exif::orientation(exif.as_deref(), xmp.map(Vec::as_slice))
    }
}

/// Decodes EXIF in ImageMagick's text form: three lines, then hex digits.
fn hex_profile(text: &[u8]) -> Option<Vec<u8>> {
    let mut digits =
        text.splitn(4, |&byte| byte == b'\n').nth(3).unwrap_or_default().iter().filter(|byte| {
            // Python's `bytes.fromhex` skips white space. Pillow joins the lines first.
            !matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
        });
    let mut bytes = Vec::new();
    while let Some(&high) = digits.next() {
        let low = *digits.next()?;
        let high = char::from(high).to_digit(16)?;
        let low = char::from(low).to_digit(16)?;
        bytes.push((high << 4 | low) as u8);
    }
    Some(bytes)
}

/// Splits at the first NUL byte.
fn split_at_nul(content: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = content.iter().position(|&byte| byte == 0)?;
    Some((&content[..at], &content[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn deflated(content: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(content).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn text_that_expands_beyond_1_mib_is_refused() {
        let bomb = [b"Comment\0\0", deflated(&vec![0; 2 << 20]).as_slice()].concat();
        assert!(Texts::default().compressed(&bomb).is_err());
        assert!(Texts::default().colour_profile(&bomb).is_err());
        let fits = [b"Comment\0\0", deflated(&vec![0; 1 << 20]).as_slice()].concat();
        assert!(Texts::default().compressed(&fits).is_ok());
    }

    #[test]
    fn total_text_size_is_limited() {
        let mut texts = Texts::default();
        let fits = [b"Comment\0", vec![b' '; 1 << 20].as_slice()].concat();
        assert!((0..64).all(|_| texts.plain(&fits).is_ok()));
        assert!(texts.plain(b"k\0v").is_err());
    }

    #[test]
    fn total_expansion_is_limited_even_if_discarded() {
        let text = [b"Comment\0\0", deflated(&vec![0; 1 << 20]).as_slice()].concat();
        let invalid_text =
            [b"Comment\0\x01\0\0\0", deflated(&vec![0xff; 1 << 20]).as_slice()].concat();
        let accepted = |expand: &dyn Fn(&mut Texts) -> bool| {
            let mut texts = Texts::default();
            (0..64).take_while(|_| expand(&mut texts)).count()
        };
        assert_eq!(accepted(&|texts| texts.compressed(&text).is_ok()), 7);
        assert_eq!(accepted(&|texts| texts.international(&invalid_text).is_ok()), 7);
        assert_eq!(accepted(&|texts| texts.colour_profile(&text).is_ok()), 7);
    }

    #[test]
    fn hex_profile_is_read_as_in_python() {
        assert_eq!(hex_profile(b"\nexif\n  3\n45 78\n69\n"), Some(b"Exi".to_vec()));
        assert_eq!(hex_profile(b"\nexif\n  3\n4"), None);
        assert_eq!(hex_profile(b"no lines"), Some(Vec::new()));
    }
}
