//! Media parts to bytes, identity, size and pixels.
//!
//! A chat request names its media items by `data:`, `http(s):` or `file:` URL. [`MediaDoor::open`]
//! turns such a URL into
//! [`EncodedMedia`]: the file's bytes, their [`ContentHash`], and what its header says. That is all that planning, hashing
//! and routing need of still images. Videos, recordings and images of other formats are for a
//! model's own processor to read: of these the header says nothing ([`MediaHeader::Opaque`]).
//!
//! [`with_pixels`] and [`decode`] make pixels of an image, and only of images that an engine lacks.
//! The pixels are those that vLLM 0.33 feeds to a model's processor, bit for bit: Pillow's
//! decoders, EXIF orientation applied, transparency flattened onto white, other modes converted as
//! `convert("RGB")` does. PNG, JPEG, WebP, GIF (first frame) and BMP are read; anything else is
//! [`Fault::Unsupported`]. Where Pillow raises an error, so does this crate; where vLLM goes on
//! with half an image after such an error, this crate still returns it (see [`decode`]).
//!
//! ```
//! use chiasm_media::{EncodedMedia, ImageFormat, MediaHeader, MediaLimits, decode, mm_hash};
//!
//! // A GIF of one black pixel.
//! let file: &[u8] = b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;";
//! let item = EncodedMedia::from_bytes(file.into(), &MediaLimits::default())?;
//! let MediaHeader::Image(header) = item.header else { unreachable!("a GIF is an image") };
//! assert_eq!((header.format, header.width, header.height), (ImageFormat::Gif, 1, 1));
//! assert_eq!(decode(&item)?.pixels, [0, 0, 0]);
//! assert_eq!(mm_hash(&item.content, &item.modality, b"settings").to_string().len(), 64);
//! # Ok::<(), chiasm_media::MediaError>(())
//! ```
//!
//! | module | is about |
//! |---|---|
//! | `door` | one way in for whatever names a media item |
//! | `workers` | threads for work on large files |
//! | `config`, `limits` | permissions; how large an item may be |
//! | `budget` | bytes in memory, counted and bounded |
//! | `clock` | the time by which answers age |
//! | `data_uri`, `fetch`, `local_file` | the three kinds of URL |
//! | `flight` | one piece of work for all who want the same |
//! | `contents`, `names` | what was seen before: files by content; URLs and clients' names |
//! | `counts` | what has happened, in numbers |
//! | `policy/*` | which URLs and network addresses may be fetched |
//! | `freshness/*` | for how long an answer may be reused |
//! | `media`, `identity` | what is known without decoding |
//! | `image/limits` | how large an image may be, by its header |
//! | `image/probe`, `image/container/*`, `image/exif` | headers: format, size, orientation |
//! | `image/cost` | how long decoding takes, by the header |
//! | `image/other_format` | names of what is not read |
//! | `image/decode/*` | pixels |
//! | `reader` | a cursor over bytes |
//! | `error` | what went wrong and whose fault it is |
#![forbid(unsafe_code)]

mod budget;
mod clock;
mod config;
mod contents;
mod counts;
mod data_uri;
mod door;
mod error;
mod fetch;
mod flight;
mod freshness;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod identity;
mod image;
mod limits;
mod local_file;
mod media;
mod names;
mod policy;
mod reader;
mod workers;

pub use budget::{ByteBudget, Charge, ChargedBuffer};
pub use clock::Clock;
pub use config::MediaConfig;
pub use counts::MediaCounts;
pub use door::{MediaDoor, MediaInput, MediaPart};
pub use error::{Fault, MediaError};
pub use identity::{ContentHash, mm_hash};
pub use image::{
    DecodeMemory, ImageFormat, ImageHeader, ImageLimits, RgbImage, RgbPixels, caught_panics,
    decode, decode_into, with_pixels,
};
pub use limits::MediaLimits;
pub use media::{EncodedMedia, MediaHeader};
pub use names::MediaName;
pub use policy::DomainRule;
pub use workers::Workers;
