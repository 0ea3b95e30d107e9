//! Deserialization of lists with a bound on their length, so that a small message can't fill the
//! memory.

use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::MAX_ADDRESSES;

/// The maximum length of a list: one more than the maximum number of agents, so that an excess is
/// noticed.
pub(crate) const MAX_LIST_LEN: usize = MAX_ADDRESSES + 1;

/// Deserializes a list of at most [`MAX_LIST_LEN`] elements. A longer list is an error at its first
/// element too many, because a few bytes of JSON may become many in memory.
pub(crate) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    BoundedList::deserialize(deserializer).map(|BoundedList(elements)| elements)
}

/// Deserializes as [`deserialize`] a list that Go wrote, which is `null` if it is empty.
pub(crate) fn deserialize_or_null<'de, T, D>(deserializer: D) -> Result<Option<Vec<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    let list = Option::<BoundedList<T>>::deserialize(deserializer)?;
    Ok(list.map(|BoundedList(elements)| elements))
}

struct BoundedList<T>(Vec<T>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for BoundedList<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ListVisitor(PhantomData))
    }
}

struct ListVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ListVisitor<T> {
    type Value = BoundedList<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of at most {MAX_LIST_LEN} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<BoundedList<T>, A::Error> {
        let mut elements = Vec::new();
        while let Some(element) = list.next_element()? {
            if elements.len() == MAX_LIST_LEN {
                let error = format_args!("a list has more than {MAX_LIST_LEN} elements");
                return Err(A::Error::custom(error));
            }
            elements.push(element);
        }
        Ok(BoundedList(elements))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_long_list_is_refused_before_its_end() {
        let longest = vec!["0"; MAX_LIST_LEN].join(",");
        let read =
            |text: String| deserialize::<u8, _>(&mut serde_json::Deserializer::from_str(&text));
        assert_eq!(read(format!("[{longest}]")).unwrap().len(), MAX_LIST_LEN);
        // The rest of the list is not parsed.
        let error = read(format!("[{longest},0,no JSON")).unwrap_err().to_string();
        assert!(error.contains("more than"), "{error}");
    }
}
