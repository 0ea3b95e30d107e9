//! Character classes, as defined by the regex engine of `tokenizers`.

use std::sync::OnceLock;

use tokenizers::utils::SysRegex;

/// A set of classes, one bit each.
pub(super) type Class = u8;

/// `\p{L}`
pub(super) const LETTER: Class = 1;
/// `\p{N}`
pub(super) const NUMBER: Class = 2;
/// `\p{M}`
pub(super) const MARK: Class = 4;
/// `\s`
pub(super) const SPACE: Class = 8;
/// `\r` and `\n`
pub(super) const NEWLINE: Class = 16;
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`: the leading characters of a capitalized word.
pub(super) const UPPER: Class = 32;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`: the further characters of a capitalized word.
pub(super) const LOWER: Class = 64;

const CLASSES: [(Class, &str); 7] = [
    (LETTER, r"\p{L}+"),
    (NUMBER, r"\p{N}+"),
    (MARK, r"\p{M}+"),
    (SPACE, r"\s+"),
    (NEWLINE, r"[\r\n]+"),
    (UPPER, r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+"),
    (LOWER, r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"),
];

/// The characters that are in any class.
const ANY_CLASS: &str = r"[\p{L}\p{N}\p{M}\s]+";

/// The number of characters per block of the table.
const BLOCK_CHARS: usize = 256;

/// The classes of all characters, in blocks. Equal blocks are stored once.
pub(super) struct CharClasses {
    blocks: Vec<u16>,
    classes: Vec<Class>,
    /// A copy of the classes of U+0000 to U+007F, the most frequent characters.
    ascii: [Class; 128],
}

impl CharClasses {
    /// Returns the table of this process, built on first use. `None` if the regex engine rejects a
    /// pattern.
    pub(super) fn get() -> Option<&'static Self> {
        static TABLE: OnceLock<Option<CharClasses>> = OnceLock::new();
        TABLE.get_or_init(Self::build).as_ref()
    }

    /// Builds the table by matching every character against every class.
    fn build() -> Option<Self> {
        let mut flat = vec![0; 0x11_0000];
        // Characters without a class are the majority, and are excluded first. Surrogates cannot
        // occur in a text.
        let all: String = (0..=0x10_ffff).filter_map(char::from_u32).collect();
        let any_class = SysRegex::new(ANY_CLASS).ok()?;
        let text: String = any_class.find_iter(&all).map(|(begin, end)| &all[begin..end]).collect();
        for (class, pattern) in CLASSES {
            let regex = SysRegex::new(pattern).ok()?;
            for (begin, end) in regex.find_iter(&text) {
                text[begin..end].chars().for_each(|c| flat[u32::from(c) as usize] |= class);
            }
        }
        let mut blocks: Vec<u16> = Vec::new();
        let mut classes: Vec<Class> = Vec::new();
        for block in flat.chunks(BLOCK_CHARS) {
            let existing = classes.chunks(BLOCK_CHARS).position(|other| other == block);
            let index = existing.unwrap_or(classes.len() / BLOCK_CHARS);
            if existing.is_none() {
                classes.extend_from_slice(block);
            }
            blocks.push(u16::try_from(index).ok()?);
        }
        Some(Self { blocks, classes, ascii: *flat.first_chunk()? })
    }

    /// Returns the classes of a character.
    #[inline]
    fn lookup(&self, c: char) -> Class {
        let code = u32::from(c) as usize;
        let block = usize::from(self.blocks[code / BLOCK_CHARS]);
        self.classes[block * BLOCK_CHARS + code % BLOCK_CHARS]
    }

    /// Returns the classes and the length in bytes of the character at `at`, a character boundary
    /// of `text`. At the end of the text both are 0.
    #[inline]
    pub(super) fn at(&self, text: &str, at: usize) -> (Class, usize) {
        match text.as_bytes().get(at) {
            Some(byte) if byte.is_ascii() => (self.ascii[usize::from(*byte)], 1),
            Some(_) => self.at_non_ascii(text, at),
            None => (0, 0),
        }
    }

    /// Like [`at`](Self::at), for a character outside ASCII.
    fn at_non_ascii(&self, text: &str, at: usize) -> (Class, usize) {
        text[at..].chars().next().map_or((0, 0), |c| (self.lookup(c), c.len_utf8()))
    }
}
