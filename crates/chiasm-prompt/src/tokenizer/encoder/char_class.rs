//! Classes of characters, as the regex engine of `tokenizers` sees them.

use std::sync::OnceLock;

use tokenizers::utils::SysRegex;

/// A set of classes.
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
/// `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]`: what may begin a capitalised word.
pub(super) const UPPER: Class = 32;
/// `[\p{Ll}\p{Lm}\p{Lo}\p{M}]`: what may go on with one.
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

/// All that is in one of these.
const ANY: &str = r"[\p{L}\p{N}\p{M}\s]+";

/// Characters per block of the table.
const BLOCK: usize = 256;

/// The classes of all characters, by blocks of which equal ones are kept once.
pub(super) struct CharClasses {
    blocks: Vec<u16>,
    classes: Vec<Class>,
    /// Those of U+0000 to U+007F once more, which most texts are made of.
    ascii: [Class; 128],
}

impl CharClasses {
    /// The table, made once in a process by asking the engine about every character. `None` if the
    /// engine refuses.
    pub(super) fn get() -> Option<&'static Self> {
        static TABLE: OnceLock<Option<CharClasses>> = OnceLock::new();
        TABLE.get_or_init(Self::ask).as_ref()
    }

    fn ask() -> Option<Self> {
        let mut flat = vec![0; 0x11_0000];
        // Most characters have no class, so these are sorted out first. Surrogates are in no text.
        let all: String = (0..=0x10_ffff).filter_map(char::from_u32).collect();
        let any = SysRegex::new(ANY).ok()?;
        let text: String = any.find_iter(&all).map(|(begin, end)| &all[begin..end]).collect();
        for (class, pattern) in CLASSES {
            let regex = SysRegex::new(pattern).ok()?;
            for (begin, end) in regex.find_iter(&text) {
                text[begin..end].chars().for_each(|c| flat[u32::from(c) as usize] |= class);
            }
        }
        let (mut blocks, mut classes): (Vec<u16>, Vec<Class>) = (Vec::new(), Vec::new());
        for block in flat.chunks(BLOCK) {
            let known = classes.chunks(BLOCK).position(|other| other == block);
            let index = known.unwrap_or(classes.len() / BLOCK);
            if known.is_none() {
                classes.extend_from_slice(block);
            }
            blocks.push(u16::try_from(index).ok()?);
        }
        Some(Self { blocks, classes, ascii: *flat.first_chunk()? })
    }

    #[inline]
    pub(super) fn of(&self, c: char) -> Class {
        let code = u32::from(c) as usize;
        self.classes[usize::from(self.blocks[code / BLOCK]) * BLOCK + code % BLOCK]
    }

    /// Classes and length in bytes of the character at a boundary of `text`; nothing and 0 at its
    /// end.
    #[inline]
    pub(super) fn at(&self, text: &str, at: usize) -> (Class, usize) {
        match text.as_bytes().get(at) {
            Some(byte) if byte.is_ascii() => (self.ascii[usize::from(*byte)], 1),
            Some(_) => self.at_other(text, at),
            None => (0, 0),
        }
    }

    /// The same for a character that is not of ASCII.
    fn at_other(&self, text: &str, at: usize) -> (Class, usize) {
        text[at..].chars().next().map_or((0, 0), |c| (self.of(c), c.len_utf8()))
    }
}
