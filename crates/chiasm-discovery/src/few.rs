//! Lists of a server that are bounded before they are in memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::MOST_ADDRESSES;

/// The most things of a list: one more than agents may be named, which shows that there are too
/// many.
pub(crate) const MOST: usize = MOST_ADDRESSES + 1;

/// A list of at most [`MOST`] things. One that has more is an error as soon as it does: a few bytes
/// of JSON may become many.
pub(crate) fn list<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Few::deserialize(deserializer).map(|Few(things)| things)
}

/// Reads as [`list`] does what Go writes, which writes an empty list as `null`.
pub(crate) fn list_or_null<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Ok(Option::<Few<T>>::deserialize(deserializer)?.map(|Few(things)| things))
}

struct Few<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Few<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(FewVisitor(PhantomData))
    }
}

struct FewVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for FewVisitor<T> {
    type Value = Few<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MOST} things")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Few<T>, A::Error> {
        let mut things = Vec::new();
        while let Some(thing) = list.next_element()? {
            if things.len() == MOST {
                return Err(A::Error::custom(format_args!("a list has more than {MOST} things")));
            }
            things.push(thing);
        }
        Ok(Few(things))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_that_is_too_long_is_refused_when_it_is() {
        let most = vec!["0"; MOST].join(",");
        let read = |text: String| list::<u8, _>(&mut serde_json::Deserializer::from_str(&text));
        assert_eq!(read(format!("[{most}]")).unwrap().len(), MOST);
        // What comes behind is not looked at.
        let error = read(format!("[{most},0,no JSON")).unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
    }
}
