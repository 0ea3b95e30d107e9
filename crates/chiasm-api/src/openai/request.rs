//! The body of a request. The one field that may be large has its own type; the others are JSON
//! values until they are taken.

use std::fmt;

use chiasm_media::Charge;
use serde::de::{MapAccess, Visitor};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::intake::{Intake, Seed};
use crate::error::ApiError;

/// A type that an endpoint's request body is parsed into.
pub trait RequestBody: Sized + Send + 'static {
    /// Parses the body. The charge covers the memory of the request until it is dropped.
    fn parse(intake: Intake) -> Result<(Self, Charge), ApiError>;
}

/// A potentially large field, which is parsed directly into its own type.
pub trait LargeField: Sized {
    /// The name of the field.
    const NAME: &'static str;
}

/// All fields of a body.
struct WholeBody<T> {
    fields: Fields,
    large: Option<T>,
}

/// Reads the fields of a body, with `T` as a required field. `null` counts as missing.
pub fn read<T: LargeField>(intake: &mut Intake) -> Result<(Fields, T), ApiError>
where
    for<'a, 'de> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    let (fields, large) = read_optional(intake)?;
    Ok((fields, large.ok_or_else(|| ApiError::missing(T::NAME))?))
}

/// Reads the fields of a body, with `T` as an optional field.
pub(super) fn read_optional<T: LargeField>(
    intake: &mut Intake,
) -> Result<(Fields, Option<T>), ApiError>
where
    for<'a, 'de> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    let WholeBody { fields, large } = intake.read::<WholeBody<T>>()?;
    Ok((fields, large))
}

impl<'de, T: LargeField> Visitor<'de> for Seed<'_, WholeBody<T>>
where
    for<'a> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    type Value = WholeBody<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WholeBody<T>, A::Error> {
        let intake = self.intake;
        let mut fields = Map::new();
        let mut large = None;
        while let Some(name) = intake.next_name(&mut map)? {
            let outer = intake.enter(&name);
            if name == T::NAME {
                large = map.next_value_seed(intake.seed::<Option<T>>())?;
            } else {
                let value = map.next_value_seed(intake.seed::<Value>())?;
                intake.insert(&mut fields, &name, value)?;
            }
            intake.leave(outer);
        }
        Ok(WholeBody { fields: Fields::from_map(fields), large })
    }
}
