//! Gemma's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between markers.

use super::Step;
use super::value::Value;
use crate::pending::{Found, Markers, Pending};
use crate::tools::{Types, quoted};
use crate::{CallEnd, Sink, Tools};

/// The maximum nesting depth of objects and lists. Brackets beyond it are plain text.
const MAX_DEPTH: usize = 64;

/// The syntax of such calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of a call.
    pub(crate) open: &'static str,
    /// The quote around text.
    pub(crate) quote: &'static str,
    /// The end of a call.
    pub(crate) close: &'static str,
}

/// Reads one call and streams its arguments.
///
/// A call's end also closes each value, object and list that is still open. The last brace is only
/// passed on then, so the arguments of an unfinished call are never whole JSON.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    markers: Markers,
    place: Place,
    /// The head, key or unquoted value so far.
    word: String,
    name: String,
    /// The open objects and lists, from the arguments inwards.
    levels: Vec<Level>,
    /// The possible types of the next value, if they are known.
    types: Option<Types>,
    value: Value,
}

/// The position of the reader in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    Head,
    BeforeKey,
    Key,
    QuotedKey,
    AfterQuotedKey,
    /// Before an element of a list.
    BeforeElement,
    BeforeValue,
    Word,
    Quoted,
    /// After the arguments.
    After,
}

/// An open object or list.
#[derive(Clone, Copy, Debug)]
struct Level {
    is_list: bool,
    is_empty: bool,
}

/// A piece of a call's text.
enum Piece<'a> {
    Char(char),
    /// Text within quotes.
    Text(&'a str),
    Quote,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            markers: Markers::new([form.close, form.quote]),
            place: Place::Before,
            word: String::new(),
            name: String::new(),
            levels: Vec::new(),
            types: None,
            value: Value::new(None, false, false),
        }
    }

    pub(crate) fn read(
        &mut self,
        pending: &mut Pending,
        is_last: bool,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Step {
        if self.place == Place::Before {
            pending.skip(self.form.open.len());
            self.place = Place::Head;
        }
        loop {
            let (clear, marker) = match self.markers.find(pending.rest(), is_last) {
                Found::Nothing { clear } => (clear, None),
                Found::Marker { at, number } => (at, Some(self.markers.text(number))),
            };
            self.text(&pending.rest()[..clear], tools, sink);
            pending.skip(clear + marker.map_or(0, str::len));
            match marker {
                Some(marker) if marker == self.form.quote => self.piece(Piece::Quote, tools, sink),
                // Within quotes, the other marker is text.
                Some(marker) if matches!(self.place, Place::Quoted | Place::QuotedKey) => {
                    self.text(marker, tools, sink);
                }
                Some(_) => {
                    self.close(sink);
                    return Step::Over;
                }
                None if is_last => {
                    if !self.levels.is_empty() {
                        sink.end_call(CallEnd::Unfinished);
                    }
                    return Step::Over;
                }
                None => return Step::More,
            }
        }
    }

    fn text(&mut self, text: &str, tools: &Tools, sink: &mut dyn Sink) {
        if matches!(self.place, Place::Quoted | Place::QuotedKey) {
            return self.piece(Piece::Text(text), tools, sink);
        }
        for char in text.chars() {
            self.piece(Piece::Char(char), tools, sink);
        }
    }

    /// Reads a piece, and again at each place that it led to.
    fn piece(&mut self, piece: Piece<'_>, tools: &Tools, sink: &mut dyn Sink) {
        while !self.take(&piece, tools, sink) {}
    }

    /// Reads a piece at the current place. Returns `false` if it only ended the place.
    fn take(&mut self, piece: &Piece<'_>, tools: &Tools, sink: &mut dyn Sink) -> bool {
        match (self.place, piece) {
            (Place::Head, Piece::Char('{')) => self.begin(sink),
            (Place::Head, Piece::Char(char)) => self.word.push(*char),
            (Place::BeforeKey, Piece::Quote) => self.place = Place::QuotedKey,
            (Place::BeforeKey | Place::BeforeElement, Piece::Char(' ' | ',' | '\n' | '\t')) => {}
            (Place::BeforeKey, Piece::Char('}')) => self.end_level(sink),
            (Place::BeforeKey, Piece::Char(_)) => {
                self.place = Place::Key;
                return false;
            }
            (Place::Key | Place::AfterQuotedKey, Piece::Char(':')) => self.end_key(tools, sink),
            // A key without a value is dropped.
            (Place::Key, Piece::Char('}')) => {
                self.word.clear();
                self.place = Place::BeforeKey;
                return false;
            }
            (Place::Key, Piece::Char(char)) => self.word.push(*char),
            (Place::Key, Piece::Quote) => self.word.push_str(self.form.quote),
            (Place::QuotedKey, Piece::Text(text)) => self.word.push_str(text),
            (Place::QuotedKey, Piece::Quote) => self.place = Place::AfterQuotedKey,
            (Place::AfterQuotedKey, _) => {
                self.word.clear();
                self.place = Place::BeforeKey;
                return false;
            }
            // The brace also ends the object around the list.
            (Place::BeforeElement, Piece::Char('}')) => {
                self.end_level(sink);
                return false;
            }
            (Place::BeforeElement, Piece::Char(']')) => self.end_level(sink),
            (Place::BeforeElement, _) => {
                self.separate(sink);
                self.types = None;
                self.place = Place::BeforeValue;
                return false;
            }
            (Place::BeforeValue, Piece::Quote) => {
                self.value = Value::new(self.types, false, false);
                self.place = Place::Quoted;
            }
            (Place::BeforeValue, Piece::Char(char)) if char.is_whitespace() => {}
            (Place::BeforeValue, Piece::Char('{')) if self.levels.len() <= MAX_DEPTH => {
                self.begin_level(false, sink);
            }
            (Place::BeforeValue, Piece::Char('[')) if self.levels.len() <= MAX_DEPTH => {
                self.begin_level(true, sink);
            }
            (Place::BeforeValue, _) => {
                self.place = Place::Word;
                return false;
            }
            (Place::Word, Piece::Char(',' | '}' | ']')) => {
                self.end_word(sink);
                return false;
            }
            (Place::Word, Piece::Char(char)) => self.word.push(*char),
            (Place::Word, Piece::Quote) => self.word.push_str(self.form.quote),
            (Place::Quoted, Piece::Text(text)) => self.value.push(text, sink),
            (Place::Quoted, Piece::Quote) => {
                self.value.end(sink);
                self.place = self.after_value();
            }
            (Place::Before | Place::Head | Place::After, _)
            | (Place::Quoted | Place::QuotedKey, Piece::Char(_))
            | (_, Piece::Text(_)) => {}
        }
        true
    }

    /// Begins the call, whose name is complete.
    fn begin(&mut self, sink: &mut dyn Sink) {
        self.name = name(&self.word).to_owned();
        self.word.clear();
        sink.call(&self.name, None);
        self.begin_level(false, sink);
    }

    fn begin_level(&mut self, is_list: bool, sink: &mut dyn Sink) {
        sink.arguments(if is_list { "[" } else { "{" });
        self.levels.push(Level { is_list, is_empty: true });
        self.place = if is_list { Place::BeforeElement } else { Place::BeforeKey };
    }

    fn end_level(&mut self, sink: &mut dyn Sink) {
        if self.levels.len() == 1 {
            self.place = Place::After;
            return;
        }
        if let Some(level) = self.levels.pop() {
            sink.arguments(if level.is_list { "]" } else { "}" });
        }
        self.place = self.after_value();
    }

    fn after_value(&self) -> Place {
        match self.levels.last() {
            Some(Level { is_list: true, .. }) => Place::BeforeElement,
            _ => Place::BeforeKey,
        }
    }

    /// Passes on the comma before a key or an element, unless it is the first.
    fn separate(&mut self, sink: &mut dyn Sink) {
        let Some(level) = self.levels.last_mut() else { return };
        if !level.is_empty {
            sink.arguments(",");
        }
        level.is_empty = false;
    }

    fn end_key(&mut self, tools: &Tools, sink: &mut dyn Sink) {
        self.separate(sink);
        let word = std::mem::take(&mut self.word);
        let key = if self.place == Place::Key { word.trim() } else { word.as_str() };
        sink.arguments(&format!("{}:", quoted(key)));
        let is_argument = self.levels.len() == 1;
        self.types = if is_argument { tools.types(&self.name, key) } else { None };
        self.place = Place::BeforeValue;
    }

    /// Ends a value without quotes. If its type is unknown, it is JSON where it is valid, else
    /// text.
    fn end_word(&mut self, sink: &mut dyn Sink) {
        sink.arguments(&self.types.unwrap_or(Types::ANY).read(self.word.trim()));
        self.word.clear();
        self.place = self.after_value();
    }

    /// Closes the call and each value, object and list that is still open.
    fn close(&mut self, sink: &mut dyn Sink) {
        match self.place {
            Place::Before | Place::Head => self.begin(sink),
            Place::BeforeValue | Place::Word => self.end_word(sink),
            _ => {}
        }
        while let Some(level) = self.levels.pop() {
            sink.arguments(if level.is_list { "]" } else { "}" });
        }
        sink.end_call(CallEnd::Closed);
    }
}

/// Returns the name in a call's head: `call:NAME`.
fn name(head: &str) -> &str {
    head.rsplit(':').next().unwrap_or(head).trim()
}
