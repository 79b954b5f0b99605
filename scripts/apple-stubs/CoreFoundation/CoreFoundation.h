#pragma once

#include <math.h>
#include <objc/runtime.h>
#include <stdint.h>

typedef double CFTimeInterval;
typedef const void* CFTypeRef;
typedef const struct __CFString* CFStringRef;
typedef unsigned long CFTypeID;
typedef long CFIndex;
typedef struct CGColorSpace* CGColorSpaceRef;

extern "C" {
CFTypeRef CFRetain(CFTypeRef object);
void CFRelease(CFTypeRef object);
}
