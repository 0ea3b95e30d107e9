//! A request's whole body: the one field that may be large has a type of its own, the others are
//! JSON values until they are taken.

use std::fmt;

use chiasm_media::Charge;
use serde::de::{MapAccess, Visitor};
use serde_json::{Map, Value};

use super::fields::Fields;
use super::intake::{Intake, Seed};
use crate::error::ApiError;

/// What the body of an endpoint's request becomes.
pub trait RequestBody: Sized + Send + 'static {
    /// Reads the body. The charge counts the memory of the request until it is dropped.
    fn parse(intake: Intake) -> Result<(Self, Charge), ApiError>;
}

/// A field with a type of its own.
pub trait LargeField: Sized {
    /// The name of the field.
    const NAME: &'static str;
}

/// All fields of a body.
struct Whole<T> {
    fields: Fields,
    large: Option<T>,
}

/// Reads a body's fields, `T` among them. Null is as good as absent.
pub fn read<T: LargeField>(intake: &mut Intake) -> Result<(Fields, T), ApiError>
where
    for<'a, 'de> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    let (fields, large) = read_with(intake)?;
    Ok((fields, large.ok_or_else(|| ApiError::missing(T::NAME))?))
}

/// Reads a body's fields, with or without `T`.
pub(super) fn read_with<T: LargeField>(intake: &mut Intake) -> Result<(Fields, Option<T>), ApiError>
where
    for<'a, 'de> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    let Whole { fields, large } = intake.read::<Whole<T>>()?;
    Ok((fields, large))
}

impl<'de, T: LargeField> Visitor<'de> for Seed<'_, Whole<T>>
where
    for<'a> Seed<'a, Option<T>>: Visitor<'de, Value = Option<T>>,
{
    type Value = Whole<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Whole<T>, A::Error> {
        let intake = self.intake;
        let (mut fields, mut large) = (Map::new(), None);
        while let Some(name) = intake.name(&mut map)? {
            let outer = intake.enter(&name);
            if name == T::NAME {
                large = map.next_value_seed(intake.seed::<Option<T>>())?;
            } else {
                let value = map.next_value_seed(intake.seed::<Value>())?;
                intake.insert(&mut fields, &name, value)?;
            }
            intake.leave(outer);
        }
        Ok(Whole { fields: Fields::of(fields), large })
    }
}
