//! Calls whose parameters stand in tags of their own, as text: `<parameter=city>Paris</parameter>`.

use super::Step;
use super::value::Value;
use crate::pending::{Found, Markers, Pending};
use crate::tools::quoted;
use crate::{CallEnd, Sink, Tools};

/// The syntax of such calls.
#[derive(Debug)]
pub(crate) struct Form {
    /// The beginning of all calls, which may be missing; that of the call if `call` is empty.
    pub(crate) open: &'static str,
    /// The beginning of a call, before its name.
    pub(crate) call: &'static str,
    /// The end of the name. The first `key` ends it, too.
    pub(crate) name_end: &'static str,
    /// The beginning of a parameter, before its key.
    pub(crate) key: &'static str,
    /// The end of the key, and the beginning of the value.
    pub(crate) key_end: &'static str,
    /// The beginning of the value, if the key has an end of its own.
    pub(crate) value: &'static str,
    /// The end of the value. The next key and the call's end end it, too.
    pub(crate) value_end: &'static str,
    /// The end of the call.
    pub(crate) call_end: &'static str,
    /// The end of all calls.
    pub(crate) close: &'static str,
    /// A line break after a value's beginning, and one before its end, belong to the tags.
    pub(crate) trims_lines: bool,
    /// Values declare that they are text, by `string="true"` after the key.
    pub(crate) tells_types: bool,
}

impl Form {
    pub(crate) fn markers(&self) -> [&'static str; 9] {
        let Self { open, call, name_end, key, key_end, value, value_end, call_end, close, .. } =
            self;
        [open, call, name_end, key, key_end, value, value_end, call_end, close]
    }
}

/// Reads calls of one form.
#[derive(Clone, Debug)]
pub(crate) struct Reader {
    form: &'static Form,
    place: Place,
    /// The markers that may follow at the current place.
    markers: Markers,
    /// The name or the key so far.
    head: String,
    name: String,
    /// The parameters that were told of.
    parameters: usize,
    value: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Before,
    Between,
    Name,
    Parameters,
    Key,
    BeforeValue,
    Value,
}

impl Reader {
    pub(crate) fn new(form: &'static Form) -> Self {
        Self {
            form,
            place: Place::Before,
            markers: Markers::new([]),
            head: String::new(),
            name: String::new(),
            parameters: 0,
            value: Value::new(None, false, form.trims_lines),
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
            // A call may stand without what calls stand behind.
            let has_open = pending.rest().starts_with(self.form.open);
            pending.skip(if has_open { self.form.open.len() } else { 0 });
            self.go(if self.form.call.is_empty() { Place::Name } else { Place::Between });
        }
        loop {
            let (text, marker) = match self.markers.find(pending.rest(), is_last) {
                Found::Nothing { clear } => (clear, None),
                Found::Marker { at, number } => (at, Some(self.markers.text(number))),
            };
            self.text(&pending.rest()[..text], sink);
            pending.skip(text);
            let Some(marker) = marker else {
                if is_last && self.is_in_call() {
                    sink.end_call(CallEnd::Unfinished);
                }
                return if is_last { Step::Over } else { Step::More };
            };
            if let Some(step) = self.marker(marker, pending, tools, sink) {
                return step;
            }
        }
    }

    fn is_in_call(&self) -> bool {
        !matches!(self.place, Place::Before | Place::Between | Place::Name)
    }

    fn go(&mut self, place: Place) {
        let Form { call, name_end, key, key_end, value, value_end, call_end, close, .. } =
            self.form;
        self.place = place;
        let markers: &[&'static str] = match place {
            Place::Before => &[],
            Place::Between => &[call, close],
            Place::Name => &[name_end, key, call_end, close],
            Place::Parameters => &[key, call_end, call, close],
            Place::Key => &[key_end, call_end],
            Place::BeforeValue => &[value, call_end],
            Place::Value => &[value_end, key, call_end],
        };
        self.markers = Markers::new(markers.iter().copied().filter(|marker| !marker.is_empty()));
    }

    /// Takes text in which nothing begins.
    fn text(&mut self, text: &str, sink: &mut dyn Sink) {
        match self.place {
            Place::Name | Place::Key => self.head.push_str(text),
            Place::Value => self.value.push(text, sink),
            Place::Before | Place::Between | Place::Parameters | Place::BeforeValue => {}
        }
    }

    /// Takes a marker, which is at the front of what is pending.
    fn marker(
        &mut self,
        marker: &'static str,
        pending: &mut Pending,
        tools: &Tools,
        sink: &mut dyn Sink,
    ) -> Option<Step> {
        let form = self.form;
        match self.place {
            Place::Before => {}
            Place::Between if marker == form.call => self.go(Place::Name),
            Place::Between => {
                pending.skip(marker.len());
                return Some(Step::Over);
            }
            Place::Name => {
                self.tell(sink);
                self.go(Place::Parameters);
                // What follows the name has a meaning of its own.
                if marker != form.name_end {
                    return None;
                }
            }
            Place::Parameters if marker == form.key => self.go(Place::Key),
            Place::Key if marker == form.key_end => {
                self.begin_value(tools, sink);
                self.go(if form.value.is_empty() { Place::Value } else { Place::BeforeValue });
            }
            Place::BeforeValue if marker == form.value => self.go(Place::Value),
            Place::Value => {
                self.value.end(sink);
                self.go(Place::Parameters);
                if marker != form.value_end {
                    return None;
                }
            }
            // The call's end, or that of all calls, or the next one's beginning.
            Place::Parameters | Place::Key | Place::BeforeValue => {
                if self.place == Place::BeforeValue {
                    self.value.end(sink);
                }
                self.end_call(sink);
                self.go(Place::Between);
                if marker != form.call_end {
                    return None;
                }
                if form.call.is_empty() {
                    pending.skip(marker.len());
                    return Some(Step::Over);
                }
            }
        }
        pending.skip(marker.len());
        None
    }

    fn tell(&mut self, sink: &mut dyn Sink) {
        self.name = without_quotes(self.head.trim()).trim().to_owned();
        self.head.clear();
        self.parameters = 0;
        sink.call(&self.name, None);
    }

    fn begin_value(&mut self, tools: &Tools, sink: &mut dyn Sink) {
        let head = std::mem::take(&mut self.head);
        let mut key = head.trim();
        let mut is_json = false;
        if self.form.tells_types {
            let (name, rest) = split_quoted(key);
            key = name;
            is_json = !rest.contains("string=\"true\"");
        }
        let key = without_quotes(key);
        let begin = if self.parameters == 0 { "{" } else { ", " };
        sink.arguments(&format!("{begin}{}: ", quoted(key)));
        self.parameters += 1;
        self.value = Value::new(tools.types(&self.name, key), is_json, self.form.trims_lines);
    }

    fn end_call(&mut self, sink: &mut dyn Sink) {
        self.head.clear();
        sink.arguments(if self.parameters == 0 { "{}" } else { "}" });
        sink.end_call(CallEnd::Closed);
    }
}

/// `"a"`, `'a'` and `a` are the same name.
fn without_quotes(name: &str) -> &str {
    let inside =
        |quote: char| name.strip_prefix(quote).map(|name| name.strip_suffix(quote).unwrap_or(name));
    inside('"').or_else(|| inside('\'')).unwrap_or(name)
}

/// A name in quotes, and what stands behind it.
fn split_quoted(text: &str) -> (&str, &str) {
    let Some(inside) = text.strip_prefix('"') else { return (text, "") };
    inside.split_once('"').unwrap_or((inside, ""))
}
