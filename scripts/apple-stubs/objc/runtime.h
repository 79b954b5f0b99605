// Declarations that Apple's metal-cpp needs, for a syntax check on other systems; nothing here can be linked.
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef struct objc_class* Class;
typedef struct objc_object {
  Class isa;
}* id;
typedef struct objc_selector* SEL;
typedef struct objc_method* Method;
typedef void (*IMP)(void);
typedef signed char BOOL;
struct Protocol;

#define YES 1
#define NO 0

extern "C" {
SEL sel_registerName(const char* name);
Class objc_getClass(const char* name);
Class objc_getRequiredClass(const char* name);
id objc_lookUpClass(const char* name);
Protocol* objc_getProtocol(const char* name);
Class object_getClass(id object);
const char* class_getName(Class cls);
BOOL class_addMethod(Class cls, SEL name, IMP implementation, const char* types);
Method class_getInstanceMethod(Class cls, SEL name);
void* objc_autoreleasePoolPush(void);
void objc_autoreleasePoolPop(void* pool);
}
