//! The flags of a command, each of which has a value.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;
use std::str::FromStr;

/// Flags and their values.
pub struct Flags<'a>(BTreeMap<&'a str, &'a str>);

impl<'a> Flags<'a> {
    /// Reads `--flag value` pairs; a flag at the end without a value is left out.
    pub fn new(arguments: &'a [String]) -> Self {
        Self(arguments.chunks(2).filter_map(|pair| Some((&*pair[0], &**pair.get(1)?))).collect())
    }

    /// Returns the value of a flag that may be missing.
    pub fn find(&self, name: &str) -> Option<&'a str> {
        self.0.get(name).copied()
    }

    /// Returns the value of a flag.
    ///
    /// # Errors
    /// The flag is missing.
    pub fn get(&self, name: &str) -> Result<&'a str, Box<dyn Error>> {
        self.find(name).ok_or_else(|| format!("{name} is missing").into())
    }

    /// Returns the value of a flag as a path.
    ///
    /// # Errors
    /// The flag is missing.
    pub fn path(&self, name: &str) -> Result<PathBuf, Box<dyn Error>> {
        self.get(name).map(PathBuf::from)
    }

    /// Returns the value of a flag as something that is parsed, such as a number or an address.
    ///
    /// # Errors
    /// The flag is missing, or means nothing.
    pub fn parse<T: FromStr<Err: Error + 'static>>(&self, name: &str) -> Result<T, Box<dyn Error>> {
        Ok(self.get(name)?.parse()?)
    }
}
