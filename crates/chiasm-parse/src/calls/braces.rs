//! Gemma's calls: `call:get_weather{city:<|"|>Paris<|"|>,days:3}` between markers.

use super::Step;
use super::value::Value;
use crate::pending::{Found, Markers, Pending};
use crate::tools::{Types, quoted};
use crate::{CallEnd, Sink, Tools};

/// The maximum number of values within each other. Brackets beyond it are plain text.
const MAX_DEPTH: usize = 64;

/// How such calls are written.
#[derive(Debug)]
pub(crate) struct Form {
    /// What a call begins with.
    pub(crate) open: &'static str,
    /// What stands around text.
    pub(crate) quote: &'static str,
    /// What ends a call.
    pub(crate) close: &'static str,
}

/// Reads one call and passes its arguments on as they come.
///
/// What is missing where the call is closed is taken as if it were there. The brace that ends the
/// arguments is passed on when the call is closed: those of an unfinished call are never whole.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    markers: Markers,
    place: Place,
    /// The head, key or unquoted value so far.
    word: String,
    name: String,
    /// The objects and lists around the place, the arguments first.
    levels: Vec<Level>,
    /// The possible types of the value that comes next, if they are known.
    types: Option<Types>,
    value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    Head,
    BeforeKey,
    Key,
    QuotedKey,
    BehindQuotedKey,
    /// Before an element of a list.
    BeforeElement,
    BeforeValue,
    Word,
    Quoted,
    /// Behind the arguments.
    Behind,
}

#[derive(Clone, Copy, Debug)]
struct Level {
    is_list: bool,
    is_empty: bool,
}

/// What is read next.
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

    pub(crate) fn read(&mut self, pending: &mut Pending, is_last: bool, tools: &Tools, sink: &mut dyn Sink) -> Step {
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
                // Within quotes nothing else ends.
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

    /// Reads a piece, again for each place that it ends.
    fn piece(&mut self, piece: Piece<'_>, tools: &Tools, sink: &mut dyn Sink) {
        while !self.takes(&piece, tools, sink) {}
    }

    /// Returns `false` if the piece has a meaning for the next place, too.
    fn takes(&mut self, piece: &Piece<'_>, tools: &Tools, sink: &mut dyn Sink) -> bool {
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
            (Place::Key | Place::BehindQuotedKey, Piece::Char(':')) => self.end_key(tools, sink),
            // A key without a value is none.
            (Place::Key, Piece::Char('}')) => {
                self.word.clear();
                self.place = Place::BeforeKey;
                return false;
            }
            (Place::Key, Piece::Char(char)) => self.word.push(*char),
            (Place::Key, Piece::Quote) => self.word.push_str(self.form.quote),
            (Place::QuotedKey, Piece::Text(text)) => self.word.push_str(text),
            (Place::QuotedKey, Piece::Quote) => self.place = Place::BehindQuotedKey,
            (Place::BehindQuotedKey, _) => {
                self.word.clear();
                self.place = Place::BeforeKey;
                return false;
            }
            // It ends the object around the list, too.
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
                self.place = self.behind_value();
            }
            (Place::Before | Place::Head | Place::Behind, _)
            | (Place::Quoted | Place::QuotedKey, Piece::Char(_))
            | (_, Piece::Text(_)) => {}
        }
        true
    }

    /// Begins the call, whose name is known.
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
            self.place = Place::Behind;
            return;
        }
        if let Some(level) = self.levels.pop() {
            sink.arguments(if level.is_list { "]" } else { "}" });
        }
        self.place = self.behind_value();
    }

    fn behind_value(&self) -> Place {
        match self.levels.last() {
            Some(Level { is_list: true, .. }) => Place::BeforeElement,
            _ => Place::BeforeKey,
        }
    }

    /// Writes what stands before a key or an element.
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

    /// Ends a value without quotes, which is what it is as JSON if its type is unknown.
    fn end_word(&mut self, sink: &mut dyn Sink) {
        sink.arguments(&self.types.unwrap_or(Types::ANY).read(self.word.trim()));
        self.word.clear();
        self.place = self.behind_value();
    }

    /// Closes the call and all that is open in it.
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
