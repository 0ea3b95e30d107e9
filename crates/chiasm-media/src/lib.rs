//! Loads media items: from URLs and uploads to bytes, identity, size and pixels.
//!
//! A chat request names its media items by `data:`, `http(s):` or `file:` URL.
//! [`MediaLoader::open`] turns such a URL into [`EncodedMedia`]: the file's bytes, their
//! [`ContentHash`] and its header. Planning, hashing and routing of still images need no more than
//! that. Videos, recordings and images of other formats are left to a model's own processor, and
//! their headers are not parsed ([`MediaHeader::Opaque`]).
//!
//! [`with_pixels`] and [`decode`] decode an image. Only images that an engine lacks are decoded.
//! The pixels are bit for bit those that vLLM 0.33 feeds to a model's processor: Pillow's decoders,
//! EXIF orientation applied, transparency flattened onto white, other modes converted as
//! `convert("RGB")` does. PNG, JPEG, WebP, GIF (first frame) and BMP are supported; anything else
//! is [`Fault::Unsupported`]. Where Pillow raises an error, this crate returns one, also where vLLM
//! then continues with half an image (see [`decode_into`]).
//!
//! ```
//! use chiasm_media::{EncodedMedia, ImageFormat, MediaHeader, MediaLimits, decode, mm_hash};
//!
//! // A GIF of one black pixel.
//! let file: &[u8] = b"GIF87a\x01\0\x01\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\x01\0\x01\0\0\
//!     \x02\x02D\x01\0;";
//! let item = EncodedMedia::from_bytes(file.into(), &MediaLimits::default())?;
//! let MediaHeader::Image(header) = item.header else { unreachable!("a GIF is an image") };
//! assert_eq!((header.format, header.width, header.height), (ImageFormat::Gif, 1, 1));
//! assert_eq!(decode(&item)?.pixels, [0, 0, 0]);
//! assert_eq!(mm_hash(&item.content, &item.modality, b"settings").to_string().len(), 64);
//! # Ok::<(), chiasm_media::MediaError>(())
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `loader` | the loader, from any kind of source to a media item |
//! | `executor` | executors for work on large files |
//! | `config`, `limits` | permissions; size limits of an item |
//! | `budget` | the bound on memory for media and request bodies |
//! | `clock` | the clock by which cached answers age |
//! | `data_uri`, `fetch`, `local_file` | the three kinds of URL |
//! | `flight` | single flight: concurrent callers share one fetch |
//! | `contents`, `names` | caches: files by content; URLs and clients' names |
//! | `counts` | counters |
//! | `policy/*` | rules for URLs and network addresses that may be fetched |
//! | `freshness/*` | the time for which an answer may be reused |
//! | `media`, `identity` | encoded items and their identity |
//! | `image/limits` | size limits of an image, checked against its header |
//! | `image/probe`, `image/container/*`, `image/exif` | headers: format, size, orientation |
//! | `image/cost` | the estimated decode time, from the header |
//! | `image/other_format` | names of unsupported formats |
//! | `image/decode/*` | pixels |
//! | `reader` | a cursor over bytes |
//! | `error` | errors and their classification |
#![forbid(unsafe_code)]

mod budget;
mod clock;
mod config;
mod contents;
mod counts;
mod data_uri;
mod error;
mod executor;
mod fetch;
mod flight;
mod freshness;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod identity;
mod image;
mod limits;
mod loader;
mod local_file;
mod media;
mod names;
mod policy;
mod reader;

pub use budget::{ByteBudget, Charge, ChargedBuffer};
pub use clock::Clock;
pub use config::MediaConfig;
pub use counts::MediaCounts;
pub use error::{Fault, MediaError};
pub use executor::CpuExecutor;
pub use identity::{ContentHash, mm_hash};
pub use image::{
    DecodeMemory, ImageFormat, ImageHeader, ImageLimits, RgbImage, RgbPixels, caught_panics,
    decode, decode_into, with_pixels,
};
pub use limits::MediaLimits;
pub use loader::{MediaInput, MediaLoader, MediaPart};
pub use media::{EncodedMedia, MediaHeader};
pub use names::MediaName;
pub use policy::DomainRule;
