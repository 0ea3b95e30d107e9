//! The mapping of Rust values to msgpack: scalars, options, lists, and structs encoded as maps.

use chiasm_types::TokenId;
use rmpv::Value;

use super::error::{Problem, WireError};
use super::reader::Reader;
use super::writer::Writer;

/// A value with one representation on the wire.
pub(crate) trait Wire: Sized {
    fn write(&self, to: &mut Writer);
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError>;

    /// Writes the elements of a list, without its length.
    fn write_all(items: &[Self], to: &mut Writer) {
        items.iter().for_each(|item| item.write(to));
    }
}

macro_rules! wire_ints {
    ($($int:ty as $wide:ty, $write:ident;)*) => {$(
        impl Wire for $int {
            fn write(&self, to: &mut Writer) {
                to.$write(*self as $wide);
            }
            fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
                let value = from.int()?;
                value.try_into().map_err(|_| Problem::Range(value).at(""))
            }
        }
    )*};
}

wire_ints! {
    u32 as u64, uint;
    u64 as u64, uint;
    usize as u64, uint;
    i32 as i64, int;
    i64 as i64, int;
}

impl Wire for TokenId {
    fn write(&self, to: &mut Writer) {
        self.0.write(to);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        u32::read(from).map(Self)
    }

    // A prompt has thousands of tokens; writing them is most of the cost of writing a request.
    fn write_all(tokens: &[Self], to: &mut Writer) {
        to.tokens(tokens);
    }
}

impl Wire for bool {
    fn write(&self, to: &mut Writer) {
        to.bool(*self);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        from.bool()
    }
}

impl Wire for f64 {
    fn write(&self, to: &mut Writer) {
        to.float(*self);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        from.float()
    }
}

impl Wire for String {
    fn write(&self, to: &mut Writer) {
        to.str(self);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        from.str().map(str::to_owned)
    }
}

impl Wire for Value {
    fn write(&self, to: &mut Writer) {
        to.value(self);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        from.value()
    }
}

impl<T: Wire> Wire for Option<T> {
    fn write(&self, to: &mut Writer) {
        match self {
            Some(value) => value.write(to),
            None => to.nil(),
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        if from.take_nil()? { Ok(None) } else { T::read(from).map(Some) }
    }
}

/// A list. Nil is read as an empty list: for fields of Python's type `list | None`, both mean the
/// same to the engine.
impl<T: Wire> Wire for Vec<T> {
    fn write(&self, to: &mut Writer) {
        to.array(self.len());
        T::write_all(self, to);
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        if from.take_nil()? { Ok(Self::new()) } else { from.list(T::read) }
    }
}

/// Pairs in order, encoded as a map. Nil is read as an empty list.
impl<K: Wire, V: Wire> Wire for Vec<(K, V)> {
    fn write(&self, to: &mut Writer) {
        to.map(self.len());
        for (key, value) in self {
            key.write(to);
            value.write(to);
        }
    }
    fn read(from: &mut Reader<'_>) -> Result<Self, WireError> {
        if from.take_nil()? {
            return Ok(Self::new());
        }
        let len = from.map()?;
        let mut pairs = Self::new();
        for _ in 0..len {
            pairs.push((K::read(from)?, V::read(from)?));
        }
        Ok(pairs)
    }
}

/// Writes a list, or nil if it is empty, as vLLM does for some fields.
pub(crate) fn write_list_or_nil<T: Wire>(list: &Vec<T>, to: &mut Writer) {
    if list.is_empty() { to.nil() } else { list.write(to) }
}

/// The value that vLLM sends for a field without content.
#[derive(Clone, Copy)]
pub(crate) enum EmptyValue {
    /// `None`
    Nil,
    /// `[]`
    List,
    /// `{}`
    Map,
}

impl EmptyValue {
    pub(crate) fn write(self, to: &mut Writer) {
        match self {
            Self::Nil => to.nil(),
            Self::List => to.array(0),
            Self::Map => to.map(0),
        }
    }
}

/// Implements [`Wire`] for a struct that is encoded as a map from field names to values.
///
/// The struct is destructured whole, so a field that is not listed does not compile.
///
/// A field whose key is absent keeps its default; unknown keys are skipped. With `sparse`, fields
/// with their default value are not written, as with msgspec's `omit_defaults`. The keys listed
/// after `written empty` are written with an [`EmptyValue`] because the peer may require them; they
/// are skipped on reading.
macro_rules! wire_map {
    ($name:ident { $($field:ident = $key:literal),* $(,)? }
        $(written empty { $($absent:literal = $none:ident),* $(,)? })?) => {
        impl $crate::wire::codec::Wire for $name {
            fn write(&self, to: &mut $crate::wire::writer::Writer) {
                let Self { $($field),* } = self;
                to.map([$($key,)* $($($absent,)*)?].len());
                $( to.str($key); $field.write(to); )*
                $($( to.str($absent); $crate::wire::codec::EmptyValue::$none.write(to); )*)?
            }
            $crate::wire::codec::wire_map!(@read $($field = $key),*);
        }
    };
    (sparse $name:ident { $($field:ident = $key:literal),* $(,)? }) => {
        impl $crate::wire::codec::Wire for $name {
            fn write(&self, to: &mut $crate::wire::writer::Writer) {
                let Self { $($field),* } = self;
                let default = Self::default();
                let differs = [$(*$field != default.$field),*];
                to.map(differs.into_iter().filter(|&differs| differs).count());
                $( if *$field != default.$field { to.str($key); $field.write(to); } )*
            }
            $crate::wire::codec::wire_map!(@read $($field = $key),*);
        }
    };
    (@read $($field:ident = $key:literal),*) => {
        fn read(
            from: &mut $crate::wire::reader::Reader<'_>,
        ) -> Result<Self, $crate::wire::WireError> {
            use $crate::wire::error::Named as _;
            let mut read = Self::default();
            for _ in 0..from.map()? {
                match from.str()? {
                    $( $key => read.$field = $crate::wire::codec::Wire::read(from).named($key)?, )*
                    _ => from.skip()?,
                }
            }
            Ok(read)
        }
    };
}
pub(crate) use wire_map;

/// The unread fields of a struct that is encoded as an array.
pub(crate) struct Fields {
    left: usize,
}

impl Fields {
    /// Reads the header of an array that must have at least `expected` elements.
    pub(crate) fn open(from: &mut Reader<'_>, expected: usize) -> Result<Self, WireError> {
        let found = from.array()?;
        if found < expected {
            return Err(Problem::TooShort { expected, found }.at(""));
        }
        Ok(Self { left: found })
    }

    /// Returns `true` if the array has more than `count` unread fields.
    pub(crate) fn has_more_than(&self, count: usize) -> bool {
        self.left > count
    }

    /// Reads the next field. Returns its default if the message, from an older sender, ends before
    /// it.
    pub(crate) fn next<T: Wire + Default>(
        &mut self,
        from: &mut Reader<'_>,
    ) -> Result<T, WireError> {
        if self.left == 0 {
            return Ok(T::default());
        }
        self.left -= 1;
        T::read(from)
    }

    /// Skips all remaining fields if the known ones have the values `known`, one byte each. The
    /// message may have fewer fields, or more that a later version appended. Returns `false`, and
    /// reads nothing, if a known field has another value.
    pub(crate) fn skip_all_if(
        &mut self,
        from: &mut Reader<'_>,
        known: &[u8],
    ) -> Result<bool, WireError> {
        let expected = &known[..self.left.min(known.len())];
        if !from.skip_prefix(expected) {
            return Ok(false);
        }
        let appended = self.left - expected.len();
        self.left = 0;
        (0..appended).try_for_each(|_| from.skip())?;
        Ok(true)
    }

    /// Skips the next field, if any.
    pub(crate) fn skip(&mut self, from: &mut Reader<'_>) -> Result<(), WireError> {
        if self.left > 0 {
            self.left -= 1;
            from.skip()?;
        }
        Ok(())
    }

    /// Skips the next field, if any. Refuses any value but nil, because the field is not
    /// implemented.
    pub(crate) fn expect_nil(
        &mut self,
        from: &mut Reader<'_>,
        field: &'static str,
    ) -> Result<(), WireError> {
        if self.left > 0 {
            self.left -= 1;
            if !from.take_nil()? {
                return Err(Problem::Unsupported(field.to_owned()).at(field));
            }
        }
        Ok(())
    }

    /// Skips all fields after the first `read`, which the caller has read from the reader itself.
    pub(crate) fn close_after(self, read: usize, from: &mut Reader<'_>) -> Result<(), WireError> {
        Self { left: self.left.saturating_sub(read) }.close(from)
    }

    /// Skips the remaining fields, which this crate does not know.
    pub(crate) fn close(self, from: &mut Reader<'_>) -> Result<(), WireError> {
        (0..self.left).try_for_each(|_| from.skip())
    }
}
