//! Parses the map that replaces a tensor's bytes in a request; `docs/shared-memory.md` describes
//! its fields.
//!
//! The parser is independent of the one in `chiasm-engine`, so that each checks the other.

use chiasm_engine::wire::Value;
use chiasm_transfer::{Handle, HandleError};

/// An error of reading an out-of-band tensor.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandleProblem {
    #[error("an out-of-band tensor that is not a handle; this engine accepts only handles")]
    NoHandle,
    #[error("a handle of a version other than 1")]
    Version,
    #[error("a handle whose {0} is missing or invalid")]
    Field(&'static str),
    #[error("a handle, but no arena is attached")]
    NotAttached,
    #[error("a handle that can't be resolved: {0}")]
    Unresolved(#[from] HandleError),
    #[error("a handle for {dtype} {shape:?}, which handles do not support")]
    Tensor { dtype: String, shape: Vec<usize> },
    #[error("a slot of {length} bytes for {dtype} {shape:?}")]
    Length { dtype: String, shape: Vec<usize>, length: u64 },
}

/// Parses a handle. Unknown fields are ignored.
///
/// # Errors
/// Returns the first problem.
pub(crate) fn parse(map: &Value) -> Result<Handle, HandleProblem> {
    let version = field(map, "chiasm").ok_or(HandleProblem::NoHandle)?;
    if version.as_u64() != Some(1) {
        return Err(HandleProblem::Version);
    }
    let number = |name: &'static str| {
        field(map, name).and_then(Value::as_u64).ok_or(HandleProblem::Field(name))
    };
    let short =
        |name: &'static str| u32::try_from(number(name)?).map_err(|_| HandleProblem::Field(name));
    let arena = field(map, "arena")
        .and_then(Value::as_str)
        .and_then(arena_number)
        .ok_or(HandleProblem::Field("arena"))?;
    Ok(Handle {
        arena,
        lease: short("lease")?,
        generation: short("generation")?,
        offset: number("offset")?,
        length: number("length")?,
    })
}

/// Returns the last field with this name, as a Python dict does.
fn field<'a>(map: &'a Value, name: &str) -> Option<&'a Value> {
    map.as_map()?.iter().rev().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value)
}

/// Parses the 16 lower-case hex digits of an arena's name.
fn arena_number(digits: &str) -> Option<u64> {
    let is_valid = digits.len() == 16
        && digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    is_valid.then(|| u64::from_str_radix(digits, 16).ok())?
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn map(handle: &Handle) -> Value {
        let entry = |name: &str, value: u64| (Value::from(name), Value::from(value));
        Value::Map(vec![
            entry("chiasm", 1),
            (Value::from("arena"), Value::from(format!("{:016x}", handle.arena))),
            entry("lease", handle.lease.into()),
            entry("generation", handle.generation.into()),
            entry("offset", handle.offset),
            entry("length", handle.length),
        ])
    }

    const HANDLE: Handle =
        Handle { arena: 0xab, lease: 3, generation: u32::MAX, offset: 1 << 40, length: 376_320 };

    /// Returns the map with one field changed or removed.
    fn with(name: &str, value: Option<Value>) -> Value {
        let Value::Map(mut fields) = map(&HANDLE) else { unreachable!() };
        fields.retain(|(key, _)| key.as_str() != Some(name));
        fields.extend(value.map(|value| (Value::from(name), value)));
        Value::Map(fields)
    }

    #[test]
    fn handle_is_parsed_from_its_map() {
        assert_eq!(parse(&map(&HANDLE)), Ok(HANDLE));
        assert_eq!(parse(&with("note", Some(Value::from("new")))), Ok(HANDLE));
    }

    #[test]
    fn invalid_field_is_refused_by_name() {
        assert_eq!(parse(&Value::Nil), Err(HandleProblem::NoHandle));
        assert_eq!(parse(&with("chiasm", None)), Err(HandleProblem::NoHandle));
        assert_eq!(parse(&with("chiasm", Some(Value::from(2)))), Err(HandleProblem::Version));
        assert_eq!(parse(&with("chiasm", Some(Value::from(true)))), Err(HandleProblem::Version));
        for name in ["arena", "lease", "generation", "offset", "length"] {
            for value in [
                None,
                Some(Value::Nil),
                Some(Value::from(-1)),
                Some(Value::from(1.0)),
                Some(Value::from("7")),
            ] {
                assert_eq!(
                    parse(&with(name, value.clone())),
                    Err(HandleProblem::Field(name)),
                    "{name} {value:?}"
                );
            }
        }
        for name in ["lease", "generation"] {
            assert_eq!(
                parse(&with(name, Some(Value::from(1_u64 << 32)))),
                Err(HandleProblem::Field(name))
            );
        }
        for arena in ["00000000000000AB", "ab", "+0000000000000ab", "000000000000000ab"] {
            assert_eq!(
                parse(&with("arena", Some(Value::from(arena)))),
                Err(HandleProblem::Field("arena")),
                "{arena}"
            );
        }
    }
}
