//! The texts of a PNG file that matter: those that may hold EXIF or XMP. All are checked, since
//! Pillow refuses a file over some of them.

use std::io::Read;

use flate2::read::ZlibDecoder;

/// Pillow's `MAX_TEXT_CHUNK`: most bytes that a compressed text or profile may expand to.
const MAX_EXPANDED: u64 = 1 << 20;
/// Pillow's `MAX_TEXT_MEMORY`: most bytes of all texts of a file.
const MAX_TOTAL: u64 = 64 << 20;
/// Most bytes of all compressed texts and profiles of a file, before and after they are expanded.
/// Pillow has no such limit, and expands a thousand times a file's bytes; here that is done while
/// its header is read, which nobody has paid for.
const MAX_EXPANDING: u64 = 8 << 20;

/// A text chunk that Pillow raises for.
#[derive(Debug)]
pub(super) struct Refused;

/// A value under a keyword of the image's `info`.
enum Text {
    /// Stored as Python bytes.
    Bytes(Vec<u8>),
    /// Stored as a Python string, which Pillow cannot search for what it looks for here.
    String,
}

/// The texts under the few keywords that orientation is looked up by. A later chunk replaces an
/// earlier one.
#[derive(Default)]
pub(super) struct Texts {
    exif: Option<Text>,
    raw_profile: Option<Vec<u8>>,
    xmp: Option<Text>,
    xml_com_adobe_xmp: Option<Vec<u8>>,
    total: u64,
    /// Bytes that were expanded, and what they became.
    expanding: u64,
}

impl Texts {
    /// An `eXIf` chunk.
    pub(super) fn exif_chunk(&mut self, content: &[u8]) {
        self.exif = Some(Text::Bytes([b"Exif\0\0", content].concat()));
    }

    /// A `tEXt` chunk.
    pub(super) fn plain(&mut self, content: &[u8]) -> Result<(), Refused> {
        let (keyword, value) = split(content).unwrap_or((content, &[]));
        if keyword == b"exif" {
            self.count(value.len())?;
            self.exif = Some(Text::Bytes(value.to_vec()));
            return Ok(());
        }
        self.store(keyword, value.to_vec())
    }

    /// A `zTXt` chunk.
    pub(super) fn compressed(&mut self, content: &[u8]) -> Result<(), Refused> {
        let (keyword, value) = split(content).unwrap_or((content, &[]));
        let value = match value {
            [] => Vec::new(),
            [0, compressed @ ..] => self.expand(compressed)?.unwrap_or_default(),
            _ => return Err(Refused),
        };
        self.store(keyword, value)
    }

    /// An `iTXt` chunk. Malformed ones are passed over.
    pub(super) fn international(&mut self, content: &[u8]) -> Result<(), Refused> {
        let Some((keyword, [is_compressed, method, rest @ ..])) = split(content) else {
            return Ok(());
        };
        let Some((language, rest)) = split(rest) else {
            return Ok(());
        };
        let Some((translated, value)) = split(rest) else {
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

    /// An `iCCP` chunk: only whether Pillow refuses it.
    pub(super) fn colour_profile(&mut self, content: &[u8]) -> Result<(), Refused> {
        match split(content) {
            Some((_, [0, compressed @ ..])) => self.expand(compressed).map(drop),
            _ => Err(Refused),
        }
    }

    fn store(&mut self, keyword: &[u8], value: Vec<u8>) -> Result<(), Refused> {
        if keyword.is_empty() {
            return Ok(());
        }
        self.count(value.len())?;
        match keyword {
            b"exif" => self.exif = Some(Text::String),
            b"xmp" => self.xmp = Some(Text::String),
            b"Raw profile type exif" => self.raw_profile = Some(value),
            b"XML:com.adobe.xmp" => self.xml_com_adobe_xmp = Some(value),
            _ => {}
        }
        Ok(())
    }

    fn count(&mut self, length: usize) -> Result<(), Refused> {
        self.total += length as u64;
        if self.total > MAX_TOTAL { Err(Refused) } else { Ok(()) }
    }

    /// What a zlib stream expands to; `None` for a broken one.
    fn expand(&mut self, compressed: &[u8]) -> Result<Option<Vec<u8>>, Refused> {
        self.count_expanding(compressed.len())?;
        let mut expanded = Vec::new();
        let outcome =
            ZlibDecoder::new(compressed).take(MAX_EXPANDED + 1).read_to_end(&mut expanded);
        if expanded.len() as u64 > MAX_EXPANDED {
            return Err(Refused);
        }
        self.count_expanding(expanded.len())?;
        match outcome {
            Ok(_) => Ok(Some(expanded)),
            // Pillow keeps what a stream that is merely cut off has given so far.
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => Ok(Some(expanded)),
            Err(_) => Ok(None),
        }
    }

    fn count_expanding(&mut self, length: usize) -> Result<(), Refused> {
        self.expanding += length as u64;
        if self.expanding > MAX_EXPANDING { Err(Refused) } else { Ok(()) }
    }

    /// The orientation that these texts ask for.
    pub(super) fn orientation(&self) -> u8 {
        let exif = match (&self.exif, &self.raw_profile) {
            (Some(Text::Bytes(exif)), _) => Some(exif.clone()),
            // Pillow fails to read a string as EXIF, and vLLM ignores that.
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
            // Likewise for a string where Pillow searches bytes; with a tag in the EXIF block it
            // does not search.
            (_, Some(Text::String)) | (_, None) => None,
        };
        crate::image::exif::orientation(exif.as_deref(), xmp.map(Vec::as_slice))
    }
}

/// ImageMagick's way to keep EXIF in a text: three lines, then hex digits.
fn hex_profile(text: &[u8]) -> Option<Vec<u8>> {
    let mut digits =
        text.splitn(4, |&byte| byte == b'\n').nth(3).unwrap_or_default().iter().filter(|byte| {
            // What Python's bytes.fromhex skips; newlines have been joined away before.
            !matches!(byte, b' ' | b'\t' | b'\n' | b'\r' | 0x0b | 0x0c)
        });
    let mut bytes = Vec::new();
    while let Some(&high) = digits.next() {
        let low = *digits.next()?;
        let (high, low) = (char::from(high).to_digit(16)?, char::from(low).to_digit(16)?);
        bytes.push((high << 4 | low) as u8);
    }
    Some(bytes)
}

fn split(content: &[u8]) -> Option<(&[u8], &[u8])> {
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
    fn a_text_that_expands_beyond_a_mebibyte_is_refused() {
        let bomb = [b"Comment\0\0", deflated(&vec![0; 2 << 20]).as_slice()].concat();
        assert!(Texts::default().compressed(&bomb).is_err());
        assert!(Texts::default().colour_profile(&bomb).is_err());
        let fits = [b"Comment\0\0", deflated(&vec![0; 1 << 20]).as_slice()].concat();
        assert!(Texts::default().compressed(&fits).is_ok());
    }

    #[test]
    fn the_texts_of_a_file_are_limited_together() {
        let mut texts = Texts::default();
        let fits = [b"Comment\0", vec![b' '; 1 << 20].as_slice()].concat();
        assert!((0..64).all(|_| texts.plain(&fits).is_ok()));
        assert!(texts.plain(b"k\0v").is_err());
    }

    #[test]
    fn what_is_expanded_of_a_file_is_limited_whether_it_is_kept_or_not() {
        let kept = [b"Comment\0\0", deflated(&vec![0; 1 << 20]).as_slice()].concat();
        let no_text = [b"Comment\0\x01\0\0\0", deflated(&vec![0xff; 1 << 20]).as_slice()].concat();
        let expanded = |expand: &dyn Fn(&mut Texts) -> bool| {
            let mut texts = Texts::default();
            (0..64).take_while(|_| expand(&mut texts)).count()
        };
        assert_eq!(expanded(&|texts| texts.compressed(&kept).is_ok()), 7);
        assert_eq!(expanded(&|texts| texts.international(&no_text).is_ok()), 7);
        assert_eq!(expanded(&|texts| texts.colour_profile(&kept).is_ok()), 7);
    }

    #[test]
    fn hex_profiles_are_read_like_python_reads_them() {
        assert_eq!(hex_profile(b"\nexif\n  3\n45 78\n69\n"), Some(b"Exi".to_vec()));
        assert_eq!(hex_profile(b"\nexif\n  3\n4"), None);
        assert_eq!(hex_profile(b"no lines"), Some(Vec::new()));
    }
}
