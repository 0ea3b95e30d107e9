//! What a request's body becomes while it is read: bounded in number, and counted in bytes before
//! it is built.
//!
//! A body is read once, by visitors that build what the request asks for and nothing between. JSON
//! of few bytes can take many times its own memory (`[[],[]]`, `{},{}`), so each of them asks the
//! [`Intake`] first.

mod shortened;

use std::borrow::Cow;
use std::fmt::{Display, Write};
use std::marker::PhantomData;
use std::ops::Range;

use bytes::Bytes;
use chiasm_media::{ByteBudget, Charge, MediaError};
use chiasm_prompt::ChatTemplate;
use chiasm_request::MediaRef;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, Visitor};
use serde_json::{Map, Value};

use super::body_limits::BodyLimits;
use crate::error::ApiError;

use shortened::Shortened;

/// What planning takes at most for a byte of a prompt's text: copies in the template's values, the
/// rendered prompt and its tokens.
pub const PLANNED_BYTES: u64 = 8;
/// What planning takes for a message and for a part of its content, beside their text: objects and
/// names in the template's values.
const PLANNED_MESSAGE_BYTES: u64 = 3 << 10;
const PLANNED_PART_BYTES: u64 = 1 << 10;
/// Bytes are taken from the budget in steps: most requests need one.
const STEP: u64 = 1 << 10;
/// What an allocation takes beside its content.
const ALLOCATION: u64 = 16;
/// Text up to this size is rather copied than that it keeps the whole body in memory: a URL, not a
/// file.
const FEW_BYTES: usize = 8 << 10;
/// What some clients write before all UTF-8, as Python's JSON reader allows.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Longer names of fields are wrong in any case, and would only be repeated in errors.
const MAX_NAME_BYTES: usize = 256;

/// One body on its way to a request.
pub struct Intake {
    body: Bytes,
    /// What is read in place of the body, if that saves much. What is kept of its strings is taken
    /// from the body: [`Intake::own`], [`Intake::own_prompt`] and [`Intake::share`] see to that.
    shortened: Option<Shortened>,
    budget: ByteBudget,
    charge: Charge,
    /// Bytes of what was built so far; no more than are charged.
    built: u64,
    /// The longest string with escapes, which the parser spells out in memory of its own.
    scratch: u64,
    room: Room,
    /// Where the reader is, such as `messages[2].content[1].text`.
    field: String,
    /// Why reading was given up, if not for the JSON itself.
    refusal: Option<ApiError>,
    /// Media items so far, in order of appearance.
    pub media: Vec<MediaRef>,
    /// Lists and objects around the JSON value that is being read.
    pub depth: usize,
    /// The template that the request's messages are for, if there is one: it may know more roles
    /// and fields than the API.
    pub template: Option<ChatTemplate>,
}

/// Things that may still be built.
struct Room {
    values: Countdown,
    messages: Countdown,
    parts: Countdown,
}

struct Countdown {
    limit: usize,
    left: usize,
    /// What an error says of more.
    what: &'static str,
    flag: &'static str,
}

impl Intake {
    /// Nothing is built of `body` yet. A byte order mark before it is no part of it.
    pub fn new(body: Bytes, limits: &BodyLimits, budget: &ByteBudget) -> Self {
        let body = if body.starts_with(BYTE_ORDER_MARK) {
            body.slice(BYTE_ORDER_MARK.len()..)
        } else {
            body
        };
        let countdown = |limit, what, flag| Countdown { limit, left: limit, what, flag };
        Self {
            body,
            shortened: None,
            budget: budget.clone(),
            charge: budget.empty_charge(),
            built: 0,
            scratch: 0,
            room: Room {
                values: countdown(limits.json_values, "values", "--max-json-values"),
                messages: countdown(limits.messages, "messages", "--max-messages"),
                parts: countdown(limits.content_parts, "content parts", "--max-content-parts"),
            },
            field: String::new(),
            refusal: None,
            media: Vec::new(),
            depth: 0,
            template: None,
        }
    }

    /// Reads the whole body.
    ///
    /// # Errors
    /// 400 for what is no JSON or has a wrong type, 413 and 503 for what is too much; each names
    /// the field.
    pub fn read<T>(&mut self) -> Result<T, ApiError>
    where
        for<'a, 'de> Seed<'a, T>: Visitor<'de, Value = T>,
    {
        self.shortened = Shortened::of(&self.body);
        let bytes = self.shortened.as_ref().map_or(0, Shortened::bytes);
        let json = self.json().clone();
        let mut json = serde_json::Deserializer::from_slice(&json);
        let read = self.take(bytes).and_then(|()| self.seed().deserialize(&mut json));
        read.and_then(|value| json.end().map(|()| value)).map_err(|error| self.fault(&error))
    }

    /// The JSON that [`Intake::read`] reads: the body, or the body without the bulk of its longest
    /// strings.
    pub fn json(&self) -> &Bytes {
        self.shortened.as_ref().map_or(&self.body, |short| &short.json)
    }

    /// Where the body has what is here in [`Intake::json`].
    pub fn in_body(&self, place: usize) -> usize {
        self.shortened.as_ref().map_or(place, |short| short.place(place))
    }

    /// The body as it came.
    pub fn body(&self) -> Bytes {
        self.body.clone()
    }

    /// The memory of what was built, counted until this is dropped.
    pub fn into_charge(self) -> Charge {
        self.charge
    }

    /// Builds a value of type `T` from whatever JSON comes next.
    pub fn seed<T>(&mut self) -> Seed<'_, T> {
        Seed { intake: self, built: PhantomData }
    }

    /// The name of an object's next field.
    pub fn name<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<Cow<'de, str>>, A::Error> {
        let Some(Text(name)) = map.next_key()? else { return Ok(None) };
        if name.len() > MAX_NAME_BYTES {
            let message = format!("a field's name has more than {MAX_NAME_BYTES} bytes");
            return Err(self.refuse_here(|field| ApiError::invalid(field, message)));
        }
        Ok(Some(name))
    }

    /// Goes on to a field or an element below the current one. Returns what [`Self::leave`] needs.
    pub fn enter(&mut self, step: impl Display) -> usize {
        let outer = self.field.len();
        // Writing to a string does not fail.
        let _ = write!(self.field, "{step}");
        outer
    }

    /// Goes back to where `enter` was called. Not done after an error, which names where the reader
    /// is.
    pub fn leave(&mut self, outer: usize) {
        self.field.truncate(outer);
    }

    /// The name of a field below the current one.
    pub fn below(&self, step: &str) -> String {
        format!("{}{step}", self.field)
    }

    /// Counts one JSON value that is kept as such.
    pub fn count_value<E: Error>(&mut self) -> Result<(), E> {
        self.count(|room| &mut room.values)
    }

    /// Counts one message.
    pub fn count_message<E: Error>(&mut self) -> Result<(), E> {
        self.count(|room| &mut room.messages)?;
        self.take(PLANNED_MESSAGE_BYTES)
    }

    /// Counts one part of a message's content.
    pub fn count_part<E: Error>(&mut self) -> Result<(), E> {
        self.count(|room| &mut room.parts)?;
        self.take(PLANNED_PART_BYTES)
    }

    fn count<E: Error>(
        &mut self,
        which: impl FnOnce(&mut Room) -> &mut Countdown,
    ) -> Result<(), E> {
        let Countdown { limit, left, what, flag } = which(&mut self.room);
        if let Some(less) = left.checked_sub(1) {
            *left = less;
            return Ok(());
        }
        let message = format!("the request has more than {limit} {what} ({flag})");
        Err(self.refuse_here(|field| ApiError::too_many(field, message)))
    }

    /// Counts `bytes` that are about to be built.
    pub fn take<E: Error>(&mut self, bytes: u64) -> Result<(), E> {
        self.built += bytes;
        let Some(more) = self.built.checked_sub(self.charge.bytes()).filter(|&more| more > 0)
        else {
            return Ok(());
        };
        self.charge
            .grow(more.next_multiple_of(STEP))
            .or_else(|_| self.charge.grow(more))
            .map_err(|busy| self.no_room(busy))
    }

    /// Counts `bytes` that are about to be built of a field that was read before.
    pub fn take_for(&mut self, field: &str, bytes: u64) -> Result<(), ApiError> {
        field.clone_into(&mut self.field);
        self.take::<serde_json::Error>(bytes).map_err(|error| self.fault(&error))
    }

    fn no_room<E: Error>(&mut self, busy: MediaError) -> E {
        if self.body.len() as u64 + self.built <= self.budget.limit() {
            return self.refuse_here(|field| ApiError::from(busy).at(field));
        }
        let message =
            "the request takes more memory than there may be (--max-bytes-in-flight)".to_owned();
        self.refuse_here(|field| ApiError::too_many(field, message))
    }

    /// Appends to a list that is counted as it grows.
    pub fn push<T, E: Error>(&mut self, list: &mut Vec<T>, item: T) -> Result<(), E> {
        if list.len() == list.capacity() {
            let more = list.capacity().max(4);
            self.take(
                (more * size_of::<T>()) as u64 + if list.is_empty() { ALLOCATION } else { 0 },
            )?;
            list.reserve_exact(more);
        }
        list.push(item);
        Ok(())
    }

    /// Copies text of a prompt out of the body, and counts what planning makes of it.
    pub fn own_prompt<E: Error>(&mut self, text: &str) -> Result<String, E> {
        let length = self.whole(text).map_or(text.len(), |whole| whole.len());
        self.take(PLANNED_BYTES * length as u64)?;
        self.own(text)
    }

    /// Counts what planning makes of a field's text that was read as a JSON value.
    ///
    /// # Errors
    /// There is no room for it.
    pub(super) fn plan_text(&mut self, field: &str, text: &str) -> Result<(), ApiError> {
        let outer = self.enter(field);
        let counted = self.take(PLANNED_BYTES * text.len() as u64);
        counted.map_err(|error: serde_json::Error| self.fault(&error))?;
        self.leave(outer);
        Ok(())
    }

    /// Copies text out of the body.
    pub fn own<E: Error>(&mut self, text: &str) -> Result<String, E> {
        if let Some(whole) = self.whole(text) {
            self.take(whole.len() as u64 + ALLOCATION)?;
            return String::from_utf8(self.body[whole].to_vec()).map_err(E::custom);
        }
        if !self.is_borrowed(text) {
            // The parser spelt out its escapes; it keeps that memory, and doubles it as it needs
            // more.
            let more = (2 * text.len() as u64).saturating_sub(self.scratch);
            self.scratch += more;
            self.take(more)?;
        }
        self.take(text.len() as u64 + ALLOCATION)?;
        Ok(text.to_owned())
    }

    /// The bytes of text that may be as large as the body itself, without a copy if nothing in it
    /// is escaped. The body stays in memory for as long as they do.
    pub fn share<E: Error>(&mut self, text: &str) -> Result<Bytes, E> {
        if let Some(whole) = self.whole(text) {
            return Ok(self.body.slice(whole));
        }
        if text.len() > FEW_BYTES && self.body.as_ptr_range().contains(&text.as_ptr()) {
            return Ok(self.body.slice_ref(text.as_bytes()));
        }
        self.own(text).map(Bytes::from)
    }

    /// Where a string is whole in the body of which the parser saw the beginning only.
    fn whole(&self, text: &str) -> Option<Range<usize>> {
        self.shortened.as_ref()?.whole(text)
    }

    /// Whether text is where the parser reads from, so that it took no memory for it.
    fn is_borrowed(&self, text: &str) -> bool {
        self.json().as_ptr_range().contains(&text.as_ptr())
    }

    /// Adds a media item.
    pub fn add_media<E: Error>(&mut self, item: MediaRef) -> Result<(), E> {
        self.take(item.field.len() as u64 + ALLOCATION)?;
        let mut media = std::mem::take(&mut self.media);
        self.push(&mut media, item)?;
        self.media = media;
        Ok(())
    }

    /// A field's string; `None` for null.
    pub fn text<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<String>, A::Error> {
        self.borrowed(map)?.map(|text| self.own(&text)).transpose()
    }

    /// A field's string, which is not kept; `None` for null.
    pub fn borrowed<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
    ) -> Result<Option<Cow<'de, str>>, A::Error> {
        Ok(map.next_value::<Option<Text<'de>>>()?.map(|Text(text)| text))
    }

    /// Reads a field of a part that nothing is known of but what the template does with it. Adds it
    /// to `fields` if the template reads it, else leaves it in `first` as [`Self::unknown`] does.
    pub fn of_template<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        name: &str,
        (fields, first): (&mut Map<String, Value>, &mut Option<String>),
    ) -> Result<(), A::Error> {
        if !self.template.as_ref().is_some_and(|template| template.reads_of_parts(name)) {
            return self.unknown(map, first);
        }
        let built = self.built;
        let value: Value = map.next_value_seed(self.seed())?;
        if value.is_null() {
            return Ok(());
        }
        // What planning makes of it, as of any text of a prompt.
        self.take(PLANNED_BYTES * (self.built - built))?;
        self.insert(fields, name, value)
    }

    /// Reads a field that nothing is known of. Leaves the first one that is not null in `first`, by
    /// its full name.
    pub fn unknown<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        first: &mut Option<String>,
    ) -> Result<(), A::Error> {
        let value: Value = map.next_value_seed(self.seed())?;
        if !value.is_null() {
            first.get_or_insert_with(|| self.field.clone());
        }
        Ok(())
    }

    /// Gives up reading.
    pub fn refuse<E: Error>(&mut self, error: ApiError) -> E {
        self.refusal = Some(error);
        E::custom("refused")
    }

    /// Gives up reading because of the current field.
    pub fn refuse_here<E: Error>(&mut self, error: impl FnOnce(&str) -> ApiError) -> E {
        let error = error(if self.field.is_empty() { "body" } else { &self.field });
        self.refuse(error)
    }

    /// Gives up reading because a field below the current one is not there.
    pub fn missing<E: Error>(&mut self, step: &str) -> E {
        let error = ApiError::missing(&self.below(step));
        self.refuse(error)
    }

    /// Gives up reading if there was a field that nothing is known of.
    pub fn refuse_unknown<E: Error>(&mut self, first: Option<String>) -> Result<(), E> {
        first.map_or(Ok(()), |field| Err(self.refuse(ApiError::unsupported(field))))
    }

    /// What a failure to read is told as.
    fn fault(&mut self, error: &serde_json::Error) -> ApiError {
        if let Some(refusal) = self.refusal.take() {
            return refusal;
        }
        let told = self.told(error);
        match (error.is_data(), self.field.as_str()) {
            (false, _) => ApiError::invalid_json(told),
            (true, "") => ApiError::invalid("body", told),
            (true, field) => ApiError::invalid(field, format!("'{field}': {told}")),
        }
    }

    /// What the parser says of a fault, with the place in the body as it came.
    fn told(&self, error: &serde_json::Error) -> String {
        let (line, column, told) = (error.line(), error.column(), error.to_string());
        let (Some(short), true) = (&self.shortened, line > 0) else { return told };
        let what = told.strip_suffix(&format!(" at line {line} column {column}")).unwrap_or(&told);
        format!("{what} at line {line} column {}", short.column(line, column))
    }
}

/// A string, borrowed from the body if nothing in it is escaped.
#[derive(Deserialize)]
pub struct Text<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// Builds a `T` within the bounds of an intake. Its implementations of [`Visitor`] say how, type by
/// type.
pub struct Seed<'a, T> {
    /// The body that is read.
    pub intake: &'a mut Intake,
    built: PhantomData<T>,
}

impl<'a, 'de, T> DeserializeSeed<'de> for Seed<'a, T>
where
    Seed<'a, T>: Visitor<'de, Value = T>,
{
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_any(self)
    }
}

#[cfg(test)]
impl Intake {
    /// The intake of a body of this JSON, with the default limits and much memory.
    pub fn of(body: &Value) -> Self {
        Self::of_text(&body.to_string())
    }

    /// The same of a body as it is written.
    pub fn of_text(body: &str) -> Self {
        Self::new(body.to_owned().into(), &BodyLimits::default(), &ByteBudget::new(1 << 30))
    }
}
